"""The wheel: what is in it, its tag, and that it works where it is unpacked, without a checkout around it."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

from support import BUILD, CHECKOUT

sys.path.insert(0, str(CHECKOUT / "python"))
import build_backend  # noqa: E402


class Wheel(unittest.TestCase):
    wheel: Path

    @classmethod
    def setUpClass(cls) -> None:
        scratch = tempfile.TemporaryDirectory(prefix="moeforge-wheel-")
        cls.addClassCleanup(scratch.cleanup)
        cls.folder = Path(scratch.name)
        cls.wheel = cls.folder / build_backend.build_wheel(scratch.name)

    def test_record(self) -> None:
        """Every file is in RECORD with its hash and size, and nothing else is."""
        with zipfile.ZipFile(self.wheel) as wheel:
            names = wheel.namelist()
            record = next(name for name in names if name.endswith("RECORD"))
            rows = list(csv.reader(wheel.read(record).decode().splitlines()))
            self.assertEqual(sorted(row[0] for row in rows), sorted(names))
            for name, digest, size in rows:
                if name != record:
                    data = wheel.read(name)
                    self.assertEqual(int(size), len(data))
                    self.assertEqual(digest, "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("="))
            self.assertEqual(wheel.read("moeforge/libmoeforge.so"), (BUILD / "libmoeforge.so").read_bytes())
            self.assertIn("moeforge/py.typed", names)

    def test_entry_point_is_that_of_pyproject(self) -> None:
        text = (CHECKOUT / "python" / "pyproject.toml").read_text()
        self.assertIn('[project.entry-points."vllm.general_plugins"]\nmoeforge = "moeforge.vllm_plugin:register"', text)
        self.assertEqual(build_backend.ENTRY_POINTS, "[vllm.general_plugins]\nmoeforge = moeforge.vllm_plugin:register\n")

    def test_version_is_the_tools(self) -> None:
        import moeforge

        self.assertEqual(build_backend.version(), moeforge.__version__)
        self.assertIn(f'#define MOEFORGE_VERSION "{moeforge.__version__}"', (CHECKOUT / "tuner" / "main.c").read_text())

    def test_equal_bytes(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            again = Path(folder, build_backend.build_wheel(folder))
            self.assertEqual(again.read_bytes(), self.wheel.read_bytes())

    def test_unpacked_it_works(self) -> None:
        """Imported from the wheel's own files, with the wheel's own library, in a process that knows no checkout."""
        site = self.folder / "site"
        with zipfile.ZipFile(self.wheel) as wheel:
            wheel.extractall(site)
        program = (
            "import moeforge, sys\n"
            "try:\n  moeforge.load('/nonexistent/p.moeforge')\n"
            "except moeforge.PackageIOError:\n  print('ok', [m for m in sys.modules if m in ('torch', 'numpy')])\n"
        )
        clean = {k: v for k, v in os.environ.items() if not k.startswith("MOEFORGE_")}
        run = subprocess.run([sys.executable, "-c", program], env={**clean, "PYTHONPATH": str(site)}, cwd="/", capture_output=True, text=True)
        self.assertEqual((run.stdout, run.stderr), ("ok []\n", ""))

    def test_tag(self) -> None:
        head = b"\x7fELF\0libc.so.6\0libmoeforge.so.1\0"
        machine = build_backend.platform.machine()
        self.assertEqual(build_backend.platform_tag(head + b"GLIBC_2.14\0GLIBC_2.34\0GLIBC_2.2.5\0"), f"manylinux_2_34_{machine}")
        self.assertEqual(build_backend.platform_tag(head + b"GLIBC_2.2.5\0"), f"manylinux_2_17_{machine}")
        self.assertEqual(build_backend.platform_tag(head + b"libasan.so.8\0GLIBC_2.34\0"), f"linux_{machine}")

    def test_without_a_library(self) -> None:
        """One line that says what to do."""
        env = {**os.environ, "MOEFORGE_LIBRARY": "/nonexistent/libmoeforge.so"}
        with tempfile.TemporaryDirectory() as folder:
            run = subprocess.run([sys.executable, str(CHECKOUT / "python" / "build_backend.py"), folder], env=env, capture_output=True, text=True)
            self.assertEqual(os.listdir(folder), [])
        self.assertNotEqual(run.returncode, 0)
        self.assertEqual(run.stderr.count("\n"), 1)
        self.assertIn("run `make`", run.stderr)


class NoLibrary(unittest.TestCase):
    def test_import_needs_none(self) -> None:
        program = "import moeforge\ntry:\n  moeforge.load('p')\nexcept moeforge.LibraryNotFound as e:\n  print(e)\n"
        env = {**os.environ, "MOEFORGE_LIBRARY": "/nonexistent/x.so", "PYTHONPATH": str(CHECKOUT / "python" / "src")}
        run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
        self.assertEqual(run.stdout.count("\n"), 1, run.stderr)
        self.assertIn("make wheel", run.stdout)


if __name__ == "__main__":
    unittest.main()
