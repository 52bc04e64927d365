"""Flower's options for one deployment: `celery -A workers flower --conf=ops/flower/flowerconfig.py`.

`celery -A workers flower` alone has the Throughput page and the defaults of `workers/flower/settings.py`.
What is set here wins over those, and `FLOWER_*` variables and flags win over this.
"""

# To be reached from other machines. Only together with FLOWER_BASIC_AUTH=NAME:PASSWORD: whoever
# reaches Flower can stop the workers.
# address = "0.0.0.0"

# Nobody can stop workers from its pages.
# read_only = True

# Behind a proxy, under a path of it.
# url_prefix = "eyas"
