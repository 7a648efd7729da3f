"""The ctypes structs, enums and the status table against include/moeforge.h, by a C program that prints what the compiler makes of the header."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

from support import CHECKOUT

from moeforge import _abi, errors, package

HEADER = (CHECKOUT / "include" / "moeforge.h").read_text()


def header_fields(struct: str) -> list[str]:
    """Names of the fields in the header's order."""
    body = re.search(r"struct %s \{(.*?)\n\};" % struct, HEADER, re.S)
    assert body is not None
    text = re.sub(r"/\*.*?\*/", "", body.group(1), flags=re.S)
    names = []
    for declaration in filter(str.strip, text.split(";")):
        names += [re.search(r"(\w+)\s*$", part).group(1) for part in declaration.split(",")]  # type: ignore[union-attr]
    return names


def enum_values(name: str) -> dict[str, int]:
    body = re.search(r"enum %s \{(.*?)\}" % name, HEADER, re.S)
    assert body is not None
    return {key: int(value) for key, value in re.findall(r"(MF_\w+) = (\d+)", body.group(1))}


def python_fields(struct: str) -> list[str]:
    """The fields of the ctypes struct, without those at the end that this header does not have yet."""
    names = [field[0] for field in _abi.STRUCTS[struct]._fields_]
    known, newer = header_fields(struct), _abi.NEWER_FIELDS.get(struct, ())
    while names[-1] in newer and names[-1] not in known:
        names.pop()
    return names


class Abi(unittest.TestCase):
    def test_every_field_is_there(self) -> None:
        for struct in _abi.STRUCTS:
            self.assertEqual(python_fields(struct), header_fields(struct), f"{struct}: python/src/moeforge/_abi.py must follow include/moeforge.h")

    def test_sizes_and_offsets(self) -> None:
        lines = []
        for struct in _abi.STRUCTS:
            lines.append(f'printf("{struct} %zu\\n", sizeof(struct {struct}));')
            for field in python_fields(struct):
                place = f"offsetof(struct {struct}, {field}), sizeof(((struct {struct} *)0)->{field})"
                lines.append(f'printf("{struct}.{field} %zu %zu\\n", {place});')
        program = "#include <moeforge.h>\n#include <stdio.h>\nint main(void)\n{\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "abi.c")
            source.write_text(program)
            subprocess.run([os.environ.get("CC", "cc"), "-std=c11", f"-I{CHECKOUT}/include", str(source), "-o", f"{folder}/abi"], check=True)
            printed = subprocess.run([f"{folder}/abi"], check=True, capture_output=True, text=True).stdout
        expected = []
        for struct, cls in _abi.STRUCTS.items():
            names = python_fields(struct)
            if len(names) == len(cls._fields_):
                size = ctypes.sizeof(cls)
            else:  # up to the fields that this header lacks
                size = getattr(cls, cls._fields_[len(names)][0]).offset
            expected.append(f"{struct} {size}")
            expected += [f"{struct}.{name} {getattr(cls, name).offset} {getattr(cls, name).size}" for name in names]
        self.assertEqual(printed.splitlines(), expected)

    def test_problem_fields(self) -> None:
        names = [name for name, _ in _abi.CProblem._fields_][1:]
        self.assertEqual(names, [field.name for field in package.dataclasses.fields(package.Problem)])

    def test_weights_fields(self) -> None:
        names = {name for name, _ in _abi.CWeights._fields_} - {"struct_size", "reserved", "reserved_f"}
        self.assertEqual(names, {field.name for field in package.dataclasses.fields(package.Weights)})

    def test_enums(self) -> None:
        for enum, cls in (("mf_score", package.Score), ("mf_dtype", package.Dtype), ("mf_act_scale", package.ActScale)):
            values = enum_values(enum)
            mine = {f"{enum.upper()}_{member.name}": int(member) for member in cls}
            if "MF_SCORE_GIVEN" not in values:
                mine.pop("MF_SCORE_GIVEN", None)
            self.assertEqual(mine, values)

    def test_flag(self) -> None:
        for value in re.findall(r"#define MF_SHARED_GATED (\d+)", HEADER):
            self.assertEqual(package.SHARED_GATED, int(value))

    def test_status_table(self) -> None:
        table = re.findall(r"X\(MF_(\w+), (\d+), \d+, +\"([^\"]*)\"\)", HEADER)
        self.assertGreater(len(table), 20)
        self.assertEqual({name: int(value) for name, value, _ in table}, {status.name: int(status) for status in errors.Status})
        library = _abi.library()
        for name, value, message in table:
            self.assertEqual(library.mf_status_string(int(value)).decode(), message)
            self.assertEqual(library.mf_status_name(int(value)).decode(), "MF_" + name)

    def test_every_function_is_declared(self) -> None:
        declared = set(re.findall(r"MF_API [^;]*?\b(mf_\w+)\(", HEADER))
        self.assertEqual(declared, set(_abi.FUNCTIONS))


class Errors(unittest.TestCase):
    def test_one_class_for_each_miss(self) -> None:
        misses = [status for status in errors.Status if status.name.startswith("MISS_")]
        classes = [errors.CLASSES[status] for status in misses]
        self.assertEqual(len(set(classes)), len(misses))
        for cls in classes:
            self.assertTrue(issubclass(cls, errors.Miss))
        for status, cls in errors.CLASSES.items():
            self.assertEqual(issubclass(cls, errors.Miss), status in misses)

    def test_message_says_what_to_do(self) -> None:
        for status, cls in errors.CLASSES.items():
            error = errors.error_of(status, "message", "MF_NAME", "doing")
            self.assertIs(type(error), cls)
            self.assertEqual(error.status, status)
            self.assertTrue(str(error).startswith("doing: message (MF_NAME)"))
            if cls is not errors.NotFound:
                self.assertTrue(cls.advice and cls.advice in str(error))

    def test_unlisted_status(self) -> None:
        self.assertIs(type(errors.error_of(errors.Status.ERR_INTERNAL, "m", "MF_ERR_INTERNAL", "d")), errors.MoeforgeError)


if __name__ == "__main__":
    unittest.main()
