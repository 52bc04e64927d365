"""What runs inside SGLang: takes hidden states where they arise and puts them into the spool.

`pip install --no-deps eyas` into SGLang's environment is the whole installation. Nothing here may
import more than NumPy, torch, SGLang, `storage.spool` and `workers.config`.
"""
