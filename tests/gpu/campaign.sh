#!/bin/sh
# Everything that needs a GPU, one step after the other, for a machine that is only there for a while.
#
#   tests/gpu/campaign.sh OUT [STEP...]       logs, tables and the new schedules.db go to the folder OUT; without steps all of them, in this order
#   MOEFORGE=build/moeforge AGREEMENT=build/tests/gpu/agreement COEXIST=build/tests/gpu/coexist SEVERAL=build/tests/gpu/several SPECS="specs/models/a.yaml ..."
#
#   acceptance   tests/gpu/acceptance.sh: cold and warm run, ten kills, export, verify                    240 s
#   agreement    GPU against emulated device, stage by stage, on the shapes of the paper (needs c++)      300 s
#   tune         every spec of SPECS (default: all), into OUT/schedules.db                                600 s
#   bench        OUT/bench.json, of which bench/performance.py makes the pages, from OUT/work.db          300 s
#   handoff      both ways of fetching h side by side, Qwen3.5-35B and DeepSeek, tuned into a store of their own               240 s
#   behind       launches behind a router, with and without programmatic dependent launch                 60 s
#   trace        timelines, one token and eight, uniform and concentrated                                 120 s
#   coexist      tests/gpu/coexist: a small shape beside other work, both kernel families                 400 s
#   qualify      Qwen3.5-35B against a Triton baseline that is measured beside it (needs torch, triton)    180 s
#   several      tests/gpu/several: a small shape on two GPUs or more in one process                     120 s
#   batch        the family of 9 to 32 tokens: as many as the shape has room for, into OUT/schedules.db, and OUT/bench-batch.json      400 s
#   sanitize     tests/gpu/sanitize.sh                                                                    3000 s
#
# One line per step: ok, FAILED or not run (exit code 77: the machine lacks what it needs), seconds, the last line of its log. A step that runs out of time
# fails; the next one runs. Exits 1 if any failed.
set -u
cd "$(dirname "$0")/../.."
out=${1:?usage: tests/gpu/campaign.sh OUT [STEP...]}
shift
mkdir -p "$out"
moeforge=${MOEFORGE:-build/moeforge}
agreement=${AGREEMENT:-build/tests/gpu/agreement}
coexist=${COEXIST:-build/tests/gpu/coexist}
several=${SEVERAL:-build/tests/gpu/several}
specs=${SPECS:-$(ls specs/models/*.yaml | grep -v tiny)}
paper='qwen3.5-35b-a3b qwen3.5-122b-a10b glm-5-tp8 deepseek-v3.1-tp8'
failed=0
store="--store $out/work.db --db $out/schedules.db"

step_acceptance() { MOEFORGE=$moeforge tests/gpu/acceptance.sh; }
step_agreement() {
  bad=0
  for s in $paper; do
    "$agreement" "specs/models/$s.yaml" 1,8 "$moeforge" || bad=1
  done
  return $bad
}
step_tune() {
  [ -e "$out/schedules.db" ] || cp schedules.db "$out/schedules.db"
  "$moeforge" tune $specs $store --gen "$out/gen"
}
step_bench() { "$moeforge" bench $paper --json $store >"$out/bench.json"; }
# The schedule $2 of the shape $1 in both forms. Whatever the other steps tuned: a store of its own has them, which `bench` then times side by side.
both_forms() {
  own="--store $out/handoff.db --db $out/handoff-shipped.db"
  forms=$2-ho0,$2-ho1
  "$moeforge" tune "specs/models/$1.yaml" $own --gen "$out/gen" --tokens 1-8 --schedule "$forms" && "$moeforge" bench "$1" $own --schedule "$forms"
}
step_handoff() { # the default of eight tokens; ring as deep as the shape allows
  both_forms qwen3.5-35b-a3b stream/ring10-ld4-la4-fl4-fd4-st0-rk1 && both_forms deepseek-v3.1-tp8 stream/ring8-ld4-la2-fl4-fd4-st0-rk1
}
step_behind() { "$moeforge" bench qwen3.5-35b-a3b $store --behind --tokens 1,2,8 --timeout-ms 1000; }
step_trace() {
  bad=0
  for routing in uniform concentrated; do
    for tokens in 1 8; do
      echo "== $routing, $tokens tokens"
      "$moeforge" trace specs/models/qwen3.5-35b-a3b.yaml --tokens $tokens --routing $routing -o "$out/trace-$routing-$tokens.svg" || bad=1
    done
  done
  return $bad
}
small_package() {
  own="--store $out/small.db --db $out/small-shipped.db"
  [ -e "$out/small.moeforge" ] ||
    { "$moeforge" tune specs/models/tiny.yaml $own --gen "$out/gen" --tokens 1-16 --effort quick && "$moeforge" export tiny $own -o "$out/small.moeforge"; }
}
step_qualify() {
  python3 -c 'import torch, triton' || { echo "not run: no torch, or no triton"; return 77; }
  [ -e "$out/schedules.db" ] || cp schedules.db "$out/schedules.db"
  "$moeforge" export qwen3.5-35b-a3b $store -o "$out/qualify.moeforge" &&
    PYTHONPATH=python/src python3 bench/baseline.py "$out/qualify.moeforge" -o "$out/baseline.json" &&
    "$moeforge" qualify "$out/qualify.moeforge" --baseline "$out/baseline.json"
}
step_coexist() { small_package && "$coexist" "$out/small.moeforge"; }
step_several() { small_package && "$several" "$out/small.moeforge"; }
step_batch() { # with the watchdog first: a hang then costs milliseconds and is named
  timeout 60 "$moeforge" tune specs/models/qwen3.5-35b-a3b.yaml --debug --effort quick --tokens 16,32 --store "$out/debug.db" --db "$out/debug-shipped.db" --gen "$out/gen" &&
    "$moeforge" tune specs/models/qwen3.5-35b-a3b.yaml --tokens 1-8,16,24,32 $store --gen "$out/gen" &&
    "$moeforge" tune specs/models/deepseek-v3.1-tp8.yaml --tokens 1-8,12,16 $store --gen "$out/gen" &&
    "$moeforge" bench qwen3.5-35b-a3b deepseek-v3.1-tp8 --tokens 9-32 --json $store >"$out/bench-batch.json"
}
step_sanitize() { MOEFORGE=$moeforge LOGS=$out/sanitize tests/gpu/sanitize.sh; }

limit_of() { sed -n "s/^#   $1 .* \([0-9][0-9]*\) s\$/\1/p" "$0"; }
if [ "${1:-}" = --step ]; then
  "step_$2"
  exit $?
fi
[ $# -gt 0 ] || set -- acceptance agreement tune bench handoff behind trace qualify coexist several batch sanitize
for step in "$@"; do
  limit=$(limit_of "$step")
  [ -n "$limit" ] || { echo "campaign: there is no step $step" >&2; exit 2; }
  start=$(date +%s)
  timeout "$limit" "$0" "$out" --step "$step" >"$out/$step.txt" 2>&1
  case $? in
    0) result=ok ;;
    77) result='not run' ;;
    *) result=FAILED failed=1 ;;
  esac
  printf '%-8s %s, %d s of %d: %s\n' "$result" "$step" $(($(date +%s) - start)) "$limit" "$(tail -n 1 "$out/$step.txt" | cut -c1-160)"
done
exit $failed
