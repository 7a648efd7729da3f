"""Makes the wheel: the Python files and the prebuilt libmoeforge.so, so that whoever installs it needs no compiler. Standard library only.

    python3 python/build_backend.py OUTPUT_FOLDER     what `make wheel` runs
    pip install ./python                              the same through PEP 517

The library is build/libmoeforge.so of the checkout, or the file named in MOEFORGE_LIBRARY. The platform tag comes from the library itself: the newest
glibc symbol version that it needs makes manylinux_2_N. Equal input makes equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
import sys
import zipfile
from pathlib import Path
from typing import Any, Optional

HERE = Path(__file__).resolve().parent
NAME = "moeforge"
OLDEST_GLIBC = 17  # manylinux2014
# What manylinux lets a library need from the system, of what libmoeforge links.
SYSTEM_LIBRARIES = {"libc.so.6", "libdl.so.2", "libpthread.so.0", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}

ENTRY_POINTS = "[vllm.general_plugins]\nmoeforge = moeforge.vllm_plugin:register\n"


def version() -> str:
    text = (HERE / "pyproject.toml").read_text()
    found = re.search(r'^version = "([^"]+)"', text, re.M)
    assert found is not None
    return found.group(1)


def find_library() -> Path:
    path = Path(os.environ.get("MOEFORGE_LIBRARY") or HERE.parent / "build" / "libmoeforge.so")
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: run `make` in the checkout first, or name libmoeforge.so in MOEFORGE_LIBRARY")
    return path


def platform_tag(library: bytes) -> str:
    """manylinux_2_N_<machine> for a library that needs glibc and nothing else, linux_<machine> for any other (a sanitizer's, say)."""
    machine = platform.machine()
    needed = set(re.findall(rb"\0((?:lib|ld-)[\w.+-]*\.so[\d.]*)(?=\0)", library))
    others = {n.decode() for n in needed} - SYSTEM_LIBRARIES - {"libmoeforge.so.1", "libcuda.so.1"}
    versions = [int(v) for v in re.findall(rb"\0GLIBC_2\.(\d+)(?=[.\0])", library)]
    if others or not versions:
        return f"linux_{machine}"
    return f"manylinux_2_{max(OLDEST_GLIBC, *versions)}_{machine}"


def metadata() -> str:
    readme = (HERE / "README.md").read_text()
    return (
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version()}\nSummary: Tuned fused mixture-of-experts decode kernels, loaded from a package file\n"
        f"License: Apache-2.0\nRequires-Python: >=3.9\nProvides-Extra: torch\nRequires-Dist: torch>=2.4; extra == 'torch'\n"
        f"Description-Content-Type: text/markdown\n\n{readme}"
    )


def _write_wheel(folder: str, files: dict[str, bytes], tag: str) -> str:
    info = f"{NAME}-{version()}.dist-info"
    files[f"{info}/METADATA"] = metadata().encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    files[f"{info}/entry_points.txt"] = ENTRY_POINTS.encode()
    record = "".join(f"{name},{_digest(data)},{len(data)}\n" for name, data in sorted(files.items()))
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    name = f"{NAME}-{version()}-{tag}.whl"
    os.makedirs(folder, exist_ok=True)
    part = os.path.join(folder, name + ".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in sorted(files.items()):
            item = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            item.external_attr = (0o755 if path.endswith(".so") else 0o644) << 16
            item.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(item, data)
    os.replace(part, os.path.join(folder, name))
    return name


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


# ---- PEP 517 and 660 ----
def get_requires_for_build_wheel(config_settings: Optional[dict[str, Any]] = None) -> list[str]:
    return []


def build_wheel(wheel_directory: str, config_settings: Optional[dict[str, Any]] = None, metadata_directory: Optional[str] = None) -> str:
    source = HERE / "src"
    files = {str(p.relative_to(source)): p.read_bytes() for p in source.rglob("*") if p.suffix == ".py" or p.name == "py.typed"}
    library = find_library().read_bytes()
    files[f"{NAME}/libmoeforge.so"] = library
    return _write_wheel(wheel_directory, files, f"py3-none-{platform_tag(library)}")


def build_editable(wheel_directory: str, config_settings: Optional[dict[str, Any]] = None, metadata_directory: Optional[str] = None) -> str:
    """pip install -e: a path to src/; the library is then found in build/."""
    find_library()
    return _write_wheel(wheel_directory, {f"{NAME}.pth": f"{HERE / 'src'}\n".encode()}, "py3-none-any")


def build_sdist(sdist_directory: str, config_settings: Optional[dict[str, Any]] = None) -> str:
    raise SystemExit("no source distribution: build the library in a checkout and make a wheel of it (`make wheel`)")


if __name__ == "__main__":
    print(os.path.join(sys.argv[1], build_wheel(sys.argv[1])))
