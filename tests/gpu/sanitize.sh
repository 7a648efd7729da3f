#!/bin/sh
# The kernels under NVIDIA's compute-sanitizer, on a GPU: memcheck, initcheck, synccheck, racecheck, each on a package of a small shape.
#
#   tests/gpu/sanitize.sh [SPEC.yaml]       default: specs/models/tiny.yaml; MOEFORGE=build/moeforge, TOOLS="memcheck racecheck"
#
# The package is verified as users verify it (moeforge verify, every entry), with all child processes under the tool. One line per tool: its own count of
# errors. racecheck knows barriers, not words that are their own flags: what it says of h_loaded, published, ticket and stage_unit
# (struct Shared in templates/stream/layout.cuh) is listed in docs/kernel.md. Logs are kept in LOGS (default: a temporary folder) if a tool found something.
set -eu
cd "$(dirname "$0")/../.."
spec=${1:-specs/models/tiny.yaml}
moeforge=${MOEFORGE:-build/moeforge}
dir=${LOGS:-$(mktemp -d "${TMPDIR:-/tmp}/moeforge-sanitize-XXXXXX")}
mkdir -p "$dir"
command -v compute-sanitizer >/dev/null || { echo "sanitize: compute-sanitizer is not on PATH; it comes with the CUDA toolkit" >&2; exit 2; }
"$moeforge" tune "$spec" --effort quick --store "$dir/w.db" --db "$dir/s.db" --gen "$dir/gen" --tokens "${TOKENS:-1,3,8}" >"$dir/tune.txt" 2>&1 ||
  { tail -n 3 "$dir/tune.txt" >&2; exit 1; }
name=$("$moeforge" show --store "$dir/w.db" --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["winners"][0]["shape"])')
"$moeforge" export "$name" --store "$dir/w.db" -o "$dir/p.moeforge" >/dev/null
failed=0
for tool in ${TOOLS:-memcheck initcheck synccheck racecheck}; do
  code=0
  timeout "${SECONDS_PER_TOOL:-240}" compute-sanitizer --tool "$tool" --target-processes all --print-limit 20 "$moeforge" verify "$dir/p.moeforge" --timeout-ms 120000 \
    >"$dir/$tool.txt" 2>&1 || code=$?
  line=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$dir/$tool.txt" | sort | uniq -c | sort -rn | head -n 3 | tr '\n' ';')
  if [ "$code" -eq 0 ] && ! grep -E 'SUMMARY' "$dir/$tool.txt" | grep -vqE ' 0 (errors|hazards)'; then
    echo "ok       $tool: $line"
  else
    echo "FAILED   $tool: exit code $code; $line log: $dir/$tool.txt"
    failed=1
  fi
done
exit "$failed"
