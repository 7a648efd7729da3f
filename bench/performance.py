#!/usr/bin/env python3
"""Makes the tables of docs/performance.md and of docs/performance/ from what was measured.

    build/moeforge bench qwen3.5-35b-a3b --json >a.json; python3 bench/performance.py a.json   # takes the rows of a.json and makes the pages
    python3 bench/performance.py --bench qwen3.5-35b-a3b,glm-5-tp8                             # runs `moeforge bench` itself, on a GPU
    python3 bench/performance.py                                                               # makes the pages anew
    python3 bench/performance.py --check                                                       # says whether they are up to date

bench/measured.json keeps one row for each shape, routing input and token count: the latest. bench/peers.json has what others reach. In docs/performance.md
what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->` is replaced; docs/performance/SHAPE.md are made as a whole. Rows of other GPUs than the
peers' are refused: nothing here compares across machines. Standard library only.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

ROUTINGS = ("uniform", "zipf", "dispersed", "concentrated")
OVERVIEW = (1, 2, 4, 8, 16, 32)
Row = Dict[str, Any]
Key = Tuple[str, str, int]  # shape, routing, tokens


class Target(NamedTuple):
    """What a ratio should be at certain inputs: to the floor at most, to the better peer at least."""

    title: str
    routings: Tuple[str, ...]
    tokens: Tuple[int, ...]
    limit: float


_SPREAD = ("uniform", "dispersed")
FLOOR_TARGETS = (
    Target("uniform, dispersed: 1 token", _SPREAD, (1,), 1.30),
    Target("2 tokens", _SPREAD, (2,), 1.22),
    Target("4 to 8", _SPREAD, tuple(range(4, 9)), 1.10),
    Target("16, 32", _SPREAD, (16, 32), 1.12),
    Target("concentrated: 1 to 8", ("concentrated",), tuple(range(1, 9)), 1.30),
    Target("9 to 32", ("concentrated",), tuple(range(9, 33)), 1.60),
)
PEER_TARGETS = (
    Target("1 token", ROUTINGS, (1,), 2.0),
    Target("2 to 8", ROUTINGS, tuple(range(2, 9)), 1.4),
    Target("16, 32", ROUTINGS, (16, 32), 1.25),
)
ROW_KEYS = {"shape": str, "routing": str, "tokens": int, "active": float, "us": float, "us_low": float, "us_high": float, "floor_us": float, "schedule": str}


class Problem(Exception):
    """Something that the user can mend."""


# ---- data ----
def key_of(row: Row) -> Key:
    return row["shape"], row["routing"], row["tokens"]


class Peers:
    """Microseconds of others, by name, shape, routing, tokens."""

    def __init__(self, data: Dict[str, Any]) -> None:
        self.machine: str = data["machine"]
        self.date: str = data["date"]
        self.about: Dict[str, str] = data["peers"]
        self.us: Dict[Tuple[str, Key], float] = {}
        for entry in data["times"]:
            for tokens, us in entry["us"].items():
                self.us[entry["peer"], (entry["shape"], entry["routing"], int(tokens))] = float(us)

    def names(self, shape: str) -> List[str]:
        return [name for name in self.about if any(peer == name and key[0] == shape for peer, key in self.us)]

    def best(self, key: Key) -> Optional[float]:
        return min((us for (_, at), us in self.us.items() if at == key), default=None)


def take_bench(text: str, source: str, machine: str) -> List[Row]:
    """The winners' rows of a `moeforge bench --json`."""
    try:
        data = json.loads(text)
        device, rows = data["device"], list(data["rows"])
    except (ValueError, KeyError, TypeError) as problem:
        raise Problem(f"{source}: is not the output of `moeforge bench --json` ({problem})") from None
    if device != machine:
        raise Problem(f"{source}: was measured on {device}, the pages and the peers are of {machine}")
    taken: List[Row] = []
    for row in rows:
        if not row.get("winner", True):
            continue
        try:
            kept = {name: kind(row[name]) for name, kind in ROW_KEYS.items()}
        except (KeyError, TypeError, ValueError) as problem:
            raise Problem(f"{source}: a row lacks or spoils {problem}") from None
        if not (0 < kept["us_low"] <= kept["us"] <= kept["us_high"] and kept["floor_us"] > 0):
            raise Problem(f"{source}: {kept['shape']}, {kept['routing']}, {kept['tokens']} tokens: {kept['us']} us cannot be")
        kept.update(date=data.get("date", ""), driver=data.get("driver", 0))
        taken.append(kept)
    return taken


def rounded(row: Row) -> Row:
    """As bench/measured.json keeps it: pages are made of what is kept, so that making them again changes nothing."""
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


def merge(old: Iterable[Row], new: Iterable[Row]) -> List[Row]:
    """One row for each input: the newest."""
    rows = {key_of(row): rounded(row) for row in (*old, *new)}
    return sorted(rows.values(), key=lambda row: (row["shape"], ROUTINGS.index(row["routing"]) if row["routing"] in ROUTINGS else 9, row["tokens"]))


def measured_text(machine: str, rows: Sequence[Row]) -> str:
    """bench/measured.json: a line for each row, so that differences can be read."""
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    return f'{{\n "device": {json.dumps(machine)},\n "rows": [\n{lines}\n ]\n}}\n'


# ---- judging ----
def floor_ratio(row: Row) -> float:
    return row["us"] / row["floor_us"]


def peer_ratio(row: Row, peers: Peers) -> Optional[float]:
    best = peers.best(key_of(row))
    return None if best is None else best / row["us"]


def floor_limit(row: Row) -> Optional[float]:
    return next((t.limit for t in FLOOR_TARGETS if row["routing"] in t.routings and row["tokens"] in t.tokens), None)


def peer_limit(row: Row) -> Optional[float]:
    return next((t.limit for t in PEER_TARGETS if row["tokens"] in t.tokens), None)


def marked(ratio: Optional[float], missed: bool, digits: int) -> str:
    if ratio is None:
        return ""
    return f"**{ratio:.{digits}f}**" if missed else f"{ratio:.{digits}f}"


def floor_cell(row: Row) -> str:
    limit = floor_limit(row)
    return marked(floor_ratio(row), limit is not None and floor_ratio(row) > limit, 3)


def peer_cell(row: Row, peers: Peers) -> str:
    ratio, limit = peer_ratio(row, peers), peer_limit(row)
    return marked(ratio, ratio is not None and limit is not None and ratio < limit, 2)


class Verdict(NamedTuple):
    cell: str
    met: Optional[bool]  # None: not measured


def judge(target: Target, rows: Sequence[Row], ratio: Any, worst: Any, wanted: int, digits: int) -> Verdict:
    """The worst ratio of the target's inputs and where it is. 'wanted': inputs that would have to be measured for a whole verdict."""
    found = [(ratio(row), row) for row in rows if row["routing"] in target.routings and row["tokens"] in target.tokens and ratio(row) is not None]
    if not found:
        return Verdict("-", None)
    value, row = worst(found, key=lambda pair: pair[0])
    missed = value > target.limit if worst is max else value < target.limit
    part = "" if len(found) == wanted else f"; {len(found)} of {wanted} inputs"
    return Verdict(f"{marked(value, missed, digits)} ({row['routing']} {row['tokens']}{part})", not missed)


# ---- tables ----
def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, *lines)).replace("\n", "\n|" + "---|" * len(head) + "\n", 1)


def shapes_of(rows: Sequence[Row]) -> List[str]:
    return sorted({row["shape"] for row in rows})


def link(shape: str) -> str:
    return f"[{shape}](performance/{shape}.md)"


def targets_text(rows: Sequence[Row], peers: Peers) -> str:
    """Both tables of targets; per shape the worst of each group."""
    verdicts: List[Verdict] = []
    floor_lines, peer_lines = [], []
    for shape in shapes_of(rows):
        own = [row for row in rows if row["shape"] == shape]
        line = [judge(t, own, floor_ratio, max, len(t.routings) * len(t.tokens), 3) for t in FLOOR_TARGETS]
        verdicts += line
        floor_lines.append([link(shape), *(v.cell for v in line)])
        line = [judge(t, own, lambda row: peer_ratio(row, peers), min, sum(key[0] == shape and key[2] in t.tokens for key in {k for _, k in peers.us}), 2)
                for t in PEER_TARGETS]
        if any(v.met is not None for v in line):
            peer_lines.append([link(shape), *(v.cell for v in line)])
        verdicts += line
    met = sum(v.met is True for v in verdicts)
    return "\n\n".join((
        f"{met} of {sum(v.met is not None for v in verdicts)} measured targets are met. Each cell is the worst ratio of its inputs and where it is; **bold**: the target is missed; -: not "
        "measured.",
        "Times of the floor, at most:",
        table(["shape", *(f"{t.title} ≤ {t.limit:.2f}" for t in FLOOR_TARGETS)], floor_lines),
        "Times as fast as the better peer, at least, where a peer was measured:",
        table(["shape", *(f"{t.title} ≥ {t.limit:.2f}" for t in PEER_TARGETS)], peer_lines),
    ))


def overview_text(rows: Sequence[Row], peers: Peers) -> str:
    at = {key_of(row): row for row in rows}
    lines = []
    for shape in shapes_of(rows):
        cells = []
        for tokens in OVERVIEW:
            row = at.get((shape, "uniform", tokens))
            cells.append("-" if row is None else f"{row['us']:.2f} ({floor_ratio(row):.2f}{_beside(peer_ratio(row, peers))})")
        lines.append([link(shape), *cells])
    dates = sorted({row["date"] for row in rows if row["date"]})
    return "\n\n".join((
        f"µs per operator (times the floor; times as fast as the better peer), uniform routing. Measured {' and '.join(dates)} on one {peers.machine}; peers {peers.date}.",
        table(["shape", *(f"{tokens} token{'s' * (tokens > 1)}" for tokens in OVERVIEW)], lines),
    ))


def _beside(ratio: Optional[float]) -> str:
    return "" if ratio is None else f"; {ratio:.2f}"


def ranges(numbers: Iterable[int]) -> str:
    """[1, 2, 3, 8] is "1-3, 8"."""
    runs: List[List[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def schedules_text(rows: Sequence[Row]) -> str:
    """Who won at which of the measured token counts. A winner serves all routing inputs of its count."""
    lines = []
    for shape in shapes_of(rows):
        served: Dict[str, List[int]] = {}
        for tokens, schedule in sorted({row["tokens"]: row["schedule"] for row in rows if row["shape"] == shape}.items()):
            served.setdefault(schedule, []).append(tokens)
        for schedule, counts in served.items():
            family, _, knobs = schedule.partition("/")
            lines.append([link(shape), ranges(counts), family, f"`{knobs}`"])
    return table(["shape", "tokens", "family", "knobs"], lines)


def shape_page(shape: str, rows: Sequence[Row], peers: Peers) -> str:
    names = peers.names(shape)
    parts = [f"# {shape}", "Made by `bench/performance.py`; what the columns mean is in [performance.md](../performance.md). **Bold**: a target is missed."]
    if names:
        parts.append("\n".join(f"* **{name}**: {peers.about[name]}." for name in names))
    for routing in ROUTINGS:
        lines = []
        for row in rows:
            if row["routing"] != routing:
                continue
            others = [peers.us.get((name, key_of(row))) for name in names]
            lines.append([str(row["tokens"]), f"{row['active']:.1f}", f"{row['us']:.2f}", f"{row['us_low']:.2f}-{row['us_high']:.2f}", f"{row['floor_us']:.2f}", floor_cell(row),
                          *("" if us is None else f"{us:.1f}" for us in others), *([peer_cell(row, peers)] if names else []), f"`{row['schedule']}`", row["date"]])
        if lines:
            head = ["tokens", "experts", "µs", "95 %", "floor", "× floor", *names, *(["× better peer"] if names else []), "schedule", "measured"]
            parts += [f"## {routing}", table(head, lines)]
    return "\n\n".join(parts) + "\n"


def replace_between(page: str, name: str, text: str) -> str:
    pattern = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.S)
    if len(pattern.findall(page)) != 1:
        raise Problem(f"docs/performance.md: expected `<!-- {name}: begin -->` and `<!-- {name}: end -->` once")
    return pattern.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)


# ---- files ----
def make_pages(root: Path, rows: Sequence[Row], peers: Peers) -> Dict[Path, str]:
    """What each file should be."""
    main = root / "docs" / "performance.md"
    page = main.read_text(encoding="utf-8")
    for name, text in (("targets", targets_text(rows, peers)), ("overview", overview_text(rows, peers)), ("schedules", schedules_text(rows))):
        page = replace_between(page, name, text)
    pages = {main: page, root / "bench" / "measured.json": measured_text(peers.machine, rows)}
    for shape in shapes_of(rows):
        if not re.fullmatch(r"[a-z0-9._-]+", shape):
            raise Problem(f"\"{shape}\" is no name of a shape")
        pages[root / "docs" / "performance" / f"{shape}.md"] = shape_page(shape, [row for row in rows if row["shape"] == shape], peers)
    return pages


def stale(pages: Dict[Path, str]) -> List[Path]:
    return [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def run_bench(arguments: argparse.Namespace) -> str:
    """Progress goes to the terminal; an interrupted bench gives what it has."""
    more = ["--tokens", arguments.tokens] if arguments.tokens else []
    return subprocess.run([arguments.moeforge, "bench", *arguments.bench.split(","), "--json", *more], stdout=subprocess.PIPE, text=True, check=False).stdout


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("files", nargs="*", metavar="BENCH.json", help="output of `moeforge bench --json`; - is standard input")
    parser.add_argument("--bench", metavar="SHAPE,...", help="run `moeforge bench` on these")
    parser.add_argument("--tokens", metavar="LIST", help="with --bench: as there")
    parser.add_argument("--moeforge", default="build/moeforge", help="the tool (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page is not what the data say")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        peers = Peers(json.loads((arguments.root / "bench" / "peers.json").read_text(encoding="utf-8")))
        kept = json.loads((arguments.root / "bench" / "measured.json").read_text(encoding="utf-8"))["rows"]
        new: List[Row] = []
        for name in arguments.files:
            new += take_bench(sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8"), name, peers.machine)
        if arguments.bench:
            new += take_bench(run_bench(arguments), "moeforge bench", peers.machine)
        pages = make_pages(arguments.root, merge(kept, new), peers)
        old = stale(pages)
        if not arguments.check:
            for path in old:
                path.parent.mkdir(exist_ok=True)
                path.write_text(pages[path], encoding="utf-8")
    except (Problem, OSError) as problem:
        print(f"performance: {problem}", file=sys.stderr)
        return 2
    for path in old:
        print(f"{path.relative_to(arguments.root)}: {'is not up to date' if arguments.check else 'written'}")
    return 1 if arguments.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
