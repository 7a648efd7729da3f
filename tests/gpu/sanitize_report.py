#!/usr/bin/env python3
"""What compute-sanitizer found, by name: sanitize_report.py LOG [ALLOWED]

Reads a log of a kernel that has line information. Prints each finding once, as "writer function (file:line) <-> reader function (file:line)", with the number
of its reports, and "known" or "NEW" in front. Known is what the file ALLOWED lists (default: racecheck-allowed.txt beside this file): two functions and a
word, blank-separated; it covers hazards between lines of these functions if the word occurs on one of the two lines. Functions and words are looked up in
templates/. Exits 1 if anything is new, or if the tool counts errors that are not understood.
"""
import collections
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TEMPLATES = os.path.join(HERE, "..", "..", "templates")
ACCESS = re.compile(r"(?:(Write|Read) access )?at (.+?)\+0x([0-9a-f]+)(?: in (.+?):(\d+))?(?: \[(\d+) hazards?\])?$")
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards? displayed)")


class Place:
    """A line of the templates, its text and the function that it belongs to."""

    def __init__(self, symbol, offset, path, line):
        self.where = "%s+0x%s" % (symbol, offset)
        self.function, self.text = "?", ""
        if path is None:
            return
        name = "/".join(path.split("/")[-2:])
        self.where = "%s:%s" % (name, line)
        try:
            with open(os.path.join(TEMPLATES, name), encoding="utf-8") as file:
                lines = file.read().split("\n")
        except OSError:
            return
        self.text = lines[int(line) - 1]
        for text in reversed(lines[: int(line)]):
            found = re.match(r" {0,2}MF_(?:DEVICE|ANYWHERE)\b[^(]*?(\w+)\(", text)
            if found:
                self.function = found.group(1)
                return

    def __str__(self):
        return "%s (%s)" % (self.function, self.where)


def read_allowed(path):
    with open(path, encoding="utf-8") as file:
        rows = [line.split("#")[0].split() for line in file]
    for row in rows:
        if row and len(row) != 3:
            sys.exit("%s: expected two functions and a word, got \"%s\"" % (path, " ".join(row)))
    return [(frozenset(row[:2]), row[2]) for row in rows if row]


def read_findings(lines):
    """Counter of findings: ("race", first, second) of a hazard, (message, place) of another error in a kernel, (message,) of one of the CUDA API; and
    the tool's own count of errors."""
    findings, places = collections.Counter(), {}
    counted, message, first = 0, "", None

    def place(found):
        key = found.group(2, 3, 4, 5)
        return places.setdefault(key, Place(*key))

    for line in lines:
        if not line.startswith("====="):
            continue
        text = line.lstrip("= ").rstrip()
        summary = SUMMARY.search(text)
        if summary:
            counted = max(counted, int(summary.group(1)))
        elif text.startswith("Program hit"):
            findings[(text,)] += 1
        elif text.startswith(("Error: Race", "Warning: Race")):
            message, first = "", place(ACCESS.search(text)) if ACCESS.search(text) else None
        elif text.startswith("and ") and first is not None and ACCESS.search(text):
            findings[("race", first, place(ACCESS.search(text)))] += 1
        elif text.startswith("at ") and message and ACCESS.match(text):
            findings[(message, place(ACCESS.match(text)))] += 1
            message = ""
        elif text and not text.startswith(("Host Frame", "Saved host", "by thread", "and ", "Address", "COMPUTE", "Device Frame")):
            message, first = text, None
    return findings, counted


def is_known(finding, allowed):
    if finding[0] != "race":
        return False
    functions = frozenset(place.function for place in finding[1:])
    return any(pair == functions and any(word in place.text for place in finding[1:]) for pair, word in allowed)


def main(log, allowed_path):
    allowed = read_allowed(allowed_path)
    with open(log, encoding="utf-8", errors="replace") as file:
        findings, counted = read_findings(file)
    rows = collections.Counter()
    for finding, count in findings.items():
        what = " <-> ".join(str(place) for place in finding[1:])
        label = "known" if is_known(finding, allowed) else "NEW  "
        rows[(label, what if finding[0] == "race" else " ".join([finding[0], what]).rstrip())] += count
    for (label, what), count in sorted(rows.items()):
        print("  %s %s, %d reports" % (label, what, count))
    new = sum(label != "known" for label, _ in rows)
    if counted > 0 and not rows:
        print("  NEW   %d errors that this script does not understand" % counted)
        new += 1
    return 1 if new else 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else os.path.join(HERE, "racecheck-allowed.txt")))
