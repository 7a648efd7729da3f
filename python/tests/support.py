"""What the tests share: the build folder, packages made by build/tests/python_packages, and the scripted CUDA drivers.

MOEFORGE_BUILD names the build folder (default: build/ of the checkout). `make check-python` builds what is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any, Callable, Iterator

CHECKOUT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("MOEFORGE_BUILD") or CHECKOUT / "build").resolve()
sys.path.insert(0, str(CHECKOUT / "python" / "src"))
os.environ["MOEFORGE_LIBRARY"] = str(BUILD / "libmoeforge.so")
os.environ["MOEFORGE_LIBCUDA"] = "/nonexistent/libcuda.so"  # no GPU, whatever this machine has, until driver()

# Does this libmoeforge know routing done by the engine, and gated shared experts?
HAS_GIVEN, HAS_SHARED = (name in (CHECKOUT / "include" / "moeforge.h").read_text() for name in ("MF_SCORE_GIVEN", "MF_SHARED_GATED"))


@contextlib.contextmanager
def driver(script: str = "", library: str = "libfakecuda.so") -> Iterator[None]:
    """The scripted driver instead of the machine's; FAKECUDA is explained in tests/fake_libcuda.h."""
    values = {"MOEFORGE_LIBCUDA": str(BUILD / "tests" / library), "FAKECUDA": script}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class PackageCase(unittest.TestCase):
    """A folder with the packages that tests/python_packages.c describes."""

    folder: str

    @classmethod
    def setUpClass(cls) -> None:
        scratch = tempfile.TemporaryDirectory(prefix="moeforge-python-")
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = scratch.name
        subprocess.run([str(BUILD / "tests" / "python_packages"), cls.folder], check=True)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name + ".moeforge")


class Gpu:
    """The scripted GPU of `library` as a CUDA program sees it: primary context, memory (which is this process's own), one stream, graphs."""

    def __init__(self, library: str = "libfakecuda.so") -> None:
        self._lib = ctypes.CDLL(str(BUILD / "tests" / library))
        self._owned: list[tuple[str, ctypes.c_void_p]] = []  # each with the call that ends it
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def upload(self, data: bytes) -> int:
        """The address of a copy."""
        address = ctypes.c_void_p()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(data)))
        self._owned.append(("cuMemFree_v2", address))
        assert address.value is not None
        ctypes.memmove(address.value, data, len(data))
        return address.value

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), 1)
        self._owned.append(("cuStreamDestroy_v2", stream))
        assert stream.value is not None
        return stream.value

    def graph(self, stream: int, work: Callable[[], None]) -> Callable[[], None]:
        """Captures what `work` launches on `stream`; the result launches it and waits."""
        graph, execution = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 0)
        work()
        self._call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(execution), graph, ctypes.c_ulonglong(0))
        self._owned += [("cuGraphDestroy", graph), ("cuGraphExecDestroy", execution)]

        def launch() -> None:
            self._call("cuGraphLaunch", execution, ctypes.c_void_p(stream))
            self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

        return launch

    def __enter__(self) -> "Gpu":
        return self

    def __exit__(self, *_: object) -> None:
        for end, what in reversed(self._owned):
            self._call(end, what)
        self._call("cuCtxSetCurrent", None)
        self._call("cuDevicePrimaryCtxRelease_v2", 0)
