"""Lets the released SGLang start on a machine without a GPU; none of its files is changed.

A `.pth` file in the environment imports this at every start of its Python, so that SGLang's own
subprocesses have it too. It stands in for two things that PyPI's wheels lack without CUDA:

- `sgl_kernel` has no wheel for a CPU. Modules of that name are found here, last of all, with something
  that cannot be called under any name: SGLang imports many and, on the paths of these tests, calls none.
- torchvision's compiled part needs CUDA's libraries, without it two operators are not declared,
  and importing the Python part fails on them. They are declared just before that import.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

KEPT: list[Any] = []
"""The library of declared operators: they go when it is collected."""


class Absent:
    """Any name of it can be read, for the tables that SGLang fills on import; none can be called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> Any:
        raise NotImplementedError(f"{self._name} needs a GPU")


class AbsentModule(types.ModuleType):
    """A module in which every public name is `Absent`."""

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class AbsentKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sgl_kernel` and all modules under it where nobody else does."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "sgl_kernel":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


class TorchvisionOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; declares the operators at the first look for torchvision, and leaves."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(library)


sys.meta_path.insert(0, TorchvisionOperators())
sys.meta_path.append(AbsentKernels())
