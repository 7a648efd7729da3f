"""bench/performance.py: which rows it takes, what it judges, what it writes; and the pages of this checkout are what its data say."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any, Dict, Tuple

from support import CHECKOUT

sys.path.insert(0, str(CHECKOUT / "bench"))

import performance

PAGE = "Before.\n" + "".join(f"<!-- {name}: begin -->\nstale\n<!-- {name}: end -->\n" for name in ("targets", "overview", "schedules")) + "After.\n"
PEERS = {
    "machine": "GPU", "date": "2026-01-01", "peers": {"A": "the one", "B": "the other"},
    "times": [{"peer": "A", "shape": "s", "routing": "uniform", "us": {"1": 21, "2": 30}}, {"peer": "B", "shape": "s", "routing": "uniform", "us": {"1": 25, "2": 20}}],
}


def row(shape: str, routing: str, tokens: int, us: float, floor_us: float = 10.0, **more: Any) -> Dict[str, Any]:
    return {"shape": shape, "routing": routing, "tokens": tokens, "active": 8.0, "us": us, "us_low": us - 0.5, "us_high": us + 0.5, "floor_us": floor_us,
            "floor_copy_us": floor_us, "floor_tensor_us": None, "floor_ratio": us / floor_us, "schedule": "stream/ring4-ld2", "winner": True, **more}


class Pages(unittest.TestCase):
    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        for folder in ("bench", "docs"):
            (self.root / folder).mkdir()
        (self.root / "docs" / "performance.md").write_text(PAGE)
        (self.root / "bench" / "peers.json").write_text(json.dumps(PEERS))
        (self.root / "bench" / "measured.json").write_text('{"device": "GPU", "rows": []}')

    def run_with(self, *arguments: str, **bench: Any) -> Tuple[int, str]:
        """The exit code and all that is said."""
        words = list(arguments)
        if bench:
            (self.root / "bench.json").write_text(json.dumps({"device": "GPU", "driver": 13000, "date": "2026-02-02", "complete": True, **bench}))
            words.append(str(self.root / "bench.json"))
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = performance.main(["--root", str(self.root), *words])
        return code, out.getvalue() + err.getvalue()

    def page(self, name: str = "performance.md") -> str:
        return (self.root / "docs" / name).read_text()

    def test_tables(self) -> None:
        rows = [row("s", "uniform", 1, 10.0), row("s", "uniform", 2, 14.0), row("s", "dispersed", 2, 13.0), row("s", "concentrated", 9, 15.0, schedule="batch/g2")]
        self.assertEqual(self.run_with(rows=rows)[0], 0)
        page = self.page()
        self.assertTrue(page.startswith("Before.\n<!-- targets: begin -->\n") and page.endswith("<!-- schedules: end -->\nAfter.\n"))
        self.assertNotIn("stale", page)
        # 1 token 1.0 of 1.30; 2 tokens 1.4 of 1.22: missed; 9 concentrated 1.5 of 1.60; peers: 2.1 of 2.0, 20 / 14 = 1.43 of 1.4.
        self.assertIn("| [s](performance/s.md) | 1.000 (uniform 1; 1 of 2 inputs) | **1.400** (uniform 2) | - | - | - | 1.500 (concentrated 9; 1 of 24 inputs) |", page)
        self.assertIn("| [s](performance/s.md) | 2.10 (uniform 1) | 1.43 (uniform 2) | - |", page)
        self.assertIn("4 of 5 measured targets are met", page)
        self.assertIn("| [s](performance/s.md) | 10.00 (1.00; 2.10) | 14.00 (1.40; 1.43) | - | - | - | - |", page)
        self.assertIn("| [s](performance/s.md) | 1-2 | stream | `ring4-ld2` |\n| [s](performance/s.md) | 9 | batch | `g2` |", page)
        self.assertIn("| 2 | 8.0 | 14.00 | 13.50-14.50 | 10.00 | **1.400** | 30.0 | 20.0 | 1.43 | `stream/ring4-ld2` | 2026-02-02 |", self.page("performance/s.md"))

    def test_making_them_again_changes_nothing(self) -> None:
        # 9.43499 is kept as 9.435, which two decimals show as another number.
        self.assertEqual(self.run_with(rows=[row("s", "uniform", 1, 9.8, us_low=9.43499)])[0], 0)
        self.assertEqual(self.run_with("--check"), (0, ""))

    def test_tables_are_rectangular(self) -> None:
        self.run_with(rows=[row("s", "uniform", 1, 10.0), row("t", "zipf", 3, 10.0)])
        found = 0
        for name in ("performance.md", "performance/s.md", "performance/t.md"):
            for block in re.findall(r"(?:^\|.*\n)+", self.page(name), re.M):
                found += 1
                self.assertEqual(len({line.count("|") for line in block.splitlines()}), 1, block)
        self.assertEqual(found, 6)

    def test_peer_target_missed(self) -> None:
        self.run_with(rows=[row("s", "uniform", 1, 11.0)])
        self.assertIn("| **1.91** (uniform 1) |", self.page())

    def test_newest_row_stays(self) -> None:
        self.run_with(rows=[row("s", "uniform", 1, 10.0), row("s", "zipf", 1, 17.0)])
        self.run_with(rows=[row("s", "uniform", 1, 12.0)], date="2026-03-03")
        rows = json.loads((self.root / "bench" / "measured.json").read_text())["rows"]
        self.assertEqual([(r["routing"], r["us"], r["date"]) for r in rows], [("uniform", 12.0, "2026-03-03"), ("zipf", 17.0, "2026-02-02")])
        self.assertIn("Measured 2026-02-02 and 2026-03-03 on one GPU", self.page())

    def test_losers_are_not_taken(self) -> None:
        self.run_with(rows=[row("s", "uniform", 1, 10.0), row("s", "uniform", 1, 8.0, winner=False, schedule="stream/loser")])
        self.assertNotIn("loser", self.page("performance/s.md"))

    def test_refusals(self) -> None:
        good = row("s", "uniform", 1, 10.0)
        for bench, said in (({"rows": [good], "device": "Other"}, "measured on Other"), ({"rows": [{**good, "us": 0}]}, "cannot be"),
                            ({"rows": [{**good, "us": "fast"}]}, "lacks or spoils"), ({"rows": [{"shape": "s"}]}, "lacks or spoils 'routing'"),
                            ({"rows": [{**good, "shape": "../s"}]}, "no name of a shape"), ({"rows": 3}, "is not the output")):
            with self.subTest(said):
                code, text = self.run_with(**bench)
                self.assertEqual(code, 2)
                self.assertIn(said, text)
                self.assertEqual(self.page(), PAGE)
        (self.root / "docs" / "performance.md").write_text(PAGE.replace("<!-- overview: end -->", ""))
        self.assertIn("`<!-- overview: begin -->`", self.run_with(rows=[good])[1])

    def test_check(self) -> None:
        self.run_with(rows=[row("s", "uniform", 1, 10.0)])
        self.assertEqual(self.run_with("--check"), (0, ""))
        page = self.root / "docs" / "performance" / "s.md"
        page.write_text(page.read_text().replace("10.00", "9.00"))
        self.assertEqual(self.run_with("--check"), (1, "docs/performance/s.md: is not up to date\n"))
        self.assertIn("9.00", page.read_text())  # nothing was changed
        self.assertEqual(self.run_with(), (0, "docs/performance/s.md: written\n"))
        self.assertEqual(self.run_with("--check")[0], 0)

    def test_runs_bench(self) -> None:
        tool = self.root / "tool"
        tool.write_text("#!/bin/sh\necho \"$@\" >\"$0.asked\"\necho '" + json.dumps({"device": "GPU", "rows": [row("s", "uniform", 1, 10.0)]}) + "'\nexit 130\n")
        tool.chmod(0o755)
        self.assertEqual(self.run_with("--bench", "s,t", "--tokens", "1-8", "--moeforge", str(tool))[0], 0)
        self.assertEqual((self.root / "tool.asked").read_text(), "bench s t --json --tokens 1-8\n")
        self.assertIn("10.00", self.page("performance/s.md"))


class Checkout(unittest.TestCase):
    def test_pages_are_up_to_date(self) -> None:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            self.assertEqual(performance.main(["--check"]), 0, "run python3 bench/performance.py")

    def test_peers_are_of_shapes_that_we_have(self) -> None:
        peers = json.loads((CHECKOUT / "bench" / "peers.json").read_text())
        for entry in peers["times"]:
            self.assertTrue((CHECKOUT / "specs" / "models" / f"{entry['shape']}.yaml").exists(), entry["shape"])
            self.assertIn(entry["routing"], performance.ROUTINGS)
            self.assertIn(entry["peer"], peers["peers"])

    def test_every_page_has_a_shape(self) -> None:
        rows = json.loads((CHECKOUT / "bench" / "measured.json").read_text())["rows"]
        self.assertEqual({path.stem for path in (CHECKOUT / "docs" / "performance").glob("*.md")}, {r["shape"] for r in rows})


if __name__ == "__main__":
    unittest.main()
