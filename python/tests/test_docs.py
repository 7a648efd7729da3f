"""The Python code in the documentation compiles, and what it calls exists."""

from __future__ import annotations

import ast
import re
import unittest

from support import CHECKOUT

import moeforge

PAGES = ("integrate-python.md", "integrate-vllm.md", "integrate-sglang.md")


class Docs(unittest.TestCase):
    def test_code(self) -> None:
        found = 0
        for page in PAGES:
            for block in re.findall(r"```python\n(.*?)```", (CHECKOUT / "docs" / page).read_text(), re.S):
                tree = ast.parse(block)
                found += 1
                for node in ast.walk(tree):
                    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "moeforge" and node.attr != "torch":
                        self.assertTrue(hasattr(moeforge, node.attr), f"{page}: moeforge.{node.attr}")
        self.assertGreaterEqual(found, 4)

    def test_every_exception_is_documented(self) -> None:
        text = (CHECKOUT / "docs" / "integrate-python.md").read_text()
        for name in moeforge.__all__:
            value = getattr(moeforge, name)
            if isinstance(value, type) and issubclass(value, Exception):
                self.assertRegex(text, f"`(moeforge\\.)?{name}`")


if __name__ == "__main__":
    unittest.main()
