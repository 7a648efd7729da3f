"""tests/gpu/sanitize_report.py: what compute-sanitizer reports is named by function, and nothing that is not allowed passes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from support import CHECKOUT

SCRIPT = CHECKOUT / "tests" / "gpu" / "sanitize_report.py"


def at(file: str, text: str) -> str:
    """An access as the tool writes it, at the first line of the file that has the text."""
    lines = (CHECKOUT / "templates" / file).read_text().split("\n")
    return f"at mf_moe+0x5e40 in /somewhere/{file}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


WRITE = "Write access " + at("stream/up.cuh", "sm.reduce[buffer][consumer]")
READ = "Read access " + at("stream/handoff.cuh", "sm.reduce[b][w])[c.lane]")
OTHER = "Read access " + at("stream/handoff.cuh", "const bool routed = lane.stores()")
FLAG = (
    "Write access " + at("hw/memory.cuh", "st.release.cta.shared::cta.u32 [%0]"),
    "Read access " + at("hw/memory.cuh", "ld.acquire.cta.shared::cta.u32 %0"),
)


def race(write: str, *reads: str) -> str:
    return f"========= Error: Race reported between {write}\n" + "".join(f"=========     and {read} [992 hazards]\n" for read in reads)


class SanitizeReport(unittest.TestCase):
    def run_on(self, log: str) -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "log"
            path.write_text("========= COMPUTE-SANITIZER\n" + log)
            done = subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True, check=False)
        self.assertEqual(done.stderr, "")
        return done.returncode, done.stdout

    def test_known_hazards_pass_and_are_named(self) -> None:
        code, out = self.run_on(race(WRITE, READ, READ) + race(*FLAG) + "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n")
        self.assertEqual(code, 0, out)
        self.assertRegex(out, r"known hand_over \(stream/up\.cuh:\d+\) <-> finalise_units \(stream/handoff\.cuh:\d+\), 2 reports")
        self.assertRegex(out, r"known store_shared_release \(.*\) <-> load_shared_acquire ")

    def test_a_new_hazard_between_known_functions_fails(self) -> None:
        code, out = self.run_on(race(WRITE.replace("up.cuh", "nowhere.cuh"), READ) + race("Write access " + at("stream/up.cuh", "wgmma_fence"), OTHER))
        self.assertEqual(code, 1)
        self.assertEqual(out.count("NEW"), 2, out)
        self.assertIn("hand_over" if "hand_over" in out else "up_units", out)

    def test_other_errors_fail(self) -> None:
        for log, says in (
            ("========= Barrier error detected. Divergent thread(s) in block.\n=========     at mf_moe+0x7ea0\n=========     by thread (384,0,0)\n", "0x7ea0"),
            ('========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuX.\n', "cuX"),
            ("========= ERROR SUMMARY: 4 errors\n", "4 errors"),
            (race("Write access at mf_moe+0x10", "Read access at mf_moe+0x20"), "mf_moe+0x20"),
        ):
            code, out = self.run_on(log)
            self.assertEqual(code, 1, out)
            self.assertIn("NEW", out)
            self.assertIn(says, out)

    def test_nothing_found(self) -> None:
        self.assertEqual(self.run_on("========= ERROR SUMMARY: 0 errors\n"), (0, ""))


if __name__ == "__main__":
    unittest.main()
