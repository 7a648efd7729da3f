#!/bin/sh
# What continuous integration cannot show: a tuning run on a real GPU, from an empty store to a verified package, and what interruptions do to it.
#
#   tests/gpu/acceptance.sh [SPEC.yaml]        default: Qwen3.5-35B; about 4 minutes on an H200 with 16 cores
#   EFFORT=quick TOKENS=1 ...                  a shorter one, to try the script itself
#
# 1 cold run, and how long it took      2 warm run: nothing may be measured again
# 3 `kill -9` at ten random moments, then a run to the end: no sample lost or measured twice, and at every token count a winner that ties with the
#   cold run's (within the tie ratio of select.h, both timed side by side on other routing seeds)
# 4 export, verify                      5 default effort against the exhaustive search, side by side (EXHAUSTIVE=1)
# Prints one line per step and exits 1 if any failed. Needs python3 for the comparison only.
set -eu
cd "$(dirname "$0")/../.."
spec=${1:-specs/models/qwen3.5-35b-a3b.yaml}
moeforge=${MOEFORGE:-build/moeforge}
dir=$(mktemp -d "${TMPDIR:-/tmp}/moeforge-gpu-XXXXXX")
trap 'rm -rf "$dir"' EXIT
failed=0
say() { printf '%-8s %s\n' "$1" "$2"; [ "$1" = ok ] || failed=1; }
now() { date +%s.%N; }
since() { echo "$1 $(now)" | awk '{printf "%.1f s", $2 - $1}'; }
# (tune_itself: in the background the process is then moeforge, so that a signal reaches it and no shell.)
tune_itself() { exec "$moeforge" tune "$spec" --store "$dir/$1.db" --db "$dir/$1.shipped.db" --gen "$dir/gen" --tokens "${TOKENS:-1-8}" --effort "$2"; }
tune() { (tune_itself "$@"); }
count() { python3 -c 'import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute(sys.argv[2]).fetchone()[0])' "$dir/$1.db" "$2"; }

start=$(now)
tune cold "${EFFORT:-default}" >"$dir/cold.txt" 2>"$dir/cold.log"
say ok "cold run: $(since "$start"), $(tail -n 1 "$dir/cold.log")"
name=$("$moeforge" show --store "$dir/cold.db" --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["winners"][0]["shape"])')

start=$(now)
tune cold "${EFFORT:-default}" >/dev/null 2>"$dir/warm.log"
grep -q ' 0 samples measured' "$dir/warm.log" && say ok "warm run: $(since "$start")" || say FAILED "the warm run measured again: $(tail -n 1 "$dir/warm.log")"

before=0
for i in 1 2 3 4 5 6 7 8 9 10; do
  tune_itself killed "${EFFORT:-default}" >/dev/null 2>&1 &
  pid=$!
  sleep "$(awk -v seed="$i$$" 'BEGIN { srand(seed); printf "%.2f", 1 + 5 * rand() }')"
  kill -9 "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
  after=$(count killed 'select count(*) from sample' 2>/dev/null || echo 0)
  [ "$after" -ge "$before" ] || say FAILED "kill $i: $before samples became $after"
  before=$after
done
tune killed "${EFFORT:-default}" >/dev/null 2>"$dir/killed.log" || say FAILED "the run after ten kills: $(tail -n 1 "$dir/killed.log")"
twice=$(count killed 'select count(*) from (select 1 from sample group by candidate_id, timing_id, tokens, routing, seed, round having count(*) > 1)')
[ "$twice" = 0 ] && say ok "ten kills, then a run to the end: no sample lost, none measured twice" || say FAILED "$twice samples were measured twice"

# Both sets of winners side by side, in one process, on seeds that neither saw.
compare() {
  "$moeforge" show "$name" --store "$dir/$1.db" --json >"$dir/a.json"
  "$moeforge" show "$name" --store "$dir/$2.db" --json >"$dir/b.json"
  others=$(python3 -c 'import json, sys; print(",".join(sorted({w["schedule"] for w in json.load(open(sys.argv[1]))["winners"]})))' "$dir/$3.json")
  "$moeforge" bench "$name" --store "$dir/$4.db" --schedule "$others" --json >"$dir/bench.json"
  python3 - "$dir/a.json" "$dir/b.json" "$dir/bench.json" "$5" <<'PY'
import json, sys
a, b, rows, limit = *(json.load(open(f)) for f in sys.argv[1:4]), float(sys.argv[4])
mix = {"uniform": .5, "zipf": .2, "dispersed": .15, "concentrated": .15}
us = {}
for r in rows["rows"]:
    us.setdefault((r["tokens"], r["schedule"]), {})[r["routing"]] = r["us"]
total = lambda t, s: sum(mix[k] * v for k, v in us[(t, s)].items())
first, second = ({w["tokens_max"]: w["schedule"] for w in x["winners"]} for x in (a, b))
worst = max((total(t, second[t]) / total(t, first[t]), t) for t in first)
print("worst ratio %.4f at %d tokens" % worst)
sys.exit(worst[0] > limit)
PY
}
line=$(compare cold killed b cold 1.02) && say ok "winners after kills against the unbroken run's: $line" || say FAILED "winners after kills: $line"

"$moeforge" export "$name" --store "$dir/cold.db" -o "$dir/p.moeforge" >/dev/null 2>&1
"$moeforge" verify "$dir/p.moeforge" >"$dir/verify.txt" 2>&1 && say ok "package verified: $(grep -c passed "$dir/verify.txt") entries" || say FAILED "verify: $(tail -n 1 "$dir/verify.txt")"

if [ "${EXHAUSTIVE:-0}" = 1 ]; then
  cp "$dir/cold.db" "$dir/whole.db"
  start=$(now)
  tune whole exhaustive >/dev/null 2>"$dir/whole.log"
  say ok "exhaustive run: $(since "$start"), $(tail -n 1 "$dir/whole.log")"
  line=$(compare whole cold b whole 1.02) && say ok "default effort against the whole space: $line" || say FAILED "default effort: $line"
fi
exit $failed
