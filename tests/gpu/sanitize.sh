#!/bin/sh
# The kernels under NVIDIA's compute-sanitizer, on a GPU: memcheck, initcheck, synccheck, racecheck, each on packages of a small shape.
#
#   tests/gpu/sanitize.sh [SPEC.yaml]       default: specs/models/tiny.yaml
#   MOEFORGE=build/moeforge TOOLS="memcheck racecheck" PACKAGES="winners" TOKENS=1-16 SECONDS_PER_TOOL=400 LOGS=folder
#
# Packages:  winners   what a quick tuning of TOKENS chooses: one token to 16, so that both kernel families run
#            tickets   1 to 8 tokens with tickets from the first round on and consumers that help to load h (hand_off 1)
# Kernels are compiled with line information, which changes no code; for synccheck also with another form of CTA barrier (templates/hw/thread.cuh).
# Packages are verified as users verify them (moeforge verify, every entry), with all child processes under the tool. Per tool and package: one line, and
# what was found by name (sanitize_report.py); what racecheck-allowed.txt does not list fails. Logs stay in LOGS (default: a temporary folder).
set -eu
cd "$(dirname "$0")/../.."
spec=${1:-specs/models/tiny.yaml}
moeforge=${MOEFORGE:-build/moeforge}
seconds=${SECONDS_PER_TOOL:-400}
dir=${LOGS:-$(mktemp -d "${TMPDIR:-/tmp}/moeforge-sanitize-XXXXXX")}
mkdir -p "$dir"
command -v compute-sanitizer >/dev/null || { echo "sanitize: compute-sanitizer is not on PATH; it comes with the CUDA toolkit" >&2; exit 2; }

# The package $1 for the tool $2, made if it is not there yet: its path.
package() {
  build=--line-info
  [ "$2" != synccheck ] || build=--synccheck
  made=$dir/$1$build
  case $1 in
    winners) choice="--effort quick --tokens ${TOKENS:-1-16}" ;;
    tickets) choice="--tokens 1-8 --schedule stream/ring10-ld4-la2-fl4-fd4-st0-rk1-ho1" ;;
    *) echo "sanitize: there is no package $1" >&2; return 2 ;;
  esac
  if [ ! -e "$made.moeforge" ]; then
    # shellcheck disable=SC2086 # words of $choice
    "$moeforge" tune "$spec" $build $choice --store "$made.db" --db "$made-shipped.db" --gen "$dir/gen" >"$made.txt" 2>&1 || { tail -n 3 "$made.txt" >&2; return 1; }
    name=$("$moeforge" show --store "$made.db" --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["winners"][0]["shape"])')
    "$moeforge" export "$name" --store "$made.db" -o "$made.moeforge" >>"$made.txt" 2>&1 || return 1
  fi
  echo "$made.moeforge"
}

failed=0
for tool in ${TOOLS:-memcheck initcheck racecheck synccheck}; do
  for p in ${PACKAGES:-winners tickets}; do
    log=$dir/$p-$tool.txt
    file=$(package "$p" "$tool") || { echo "FAILED   $tool, $p: no package"; failed=1; continue; }
    # The runtime asks for the kernel's parameters one by one until the driver says that there is no further one (cuFuncGetParamInfo): no error.
    api=
    [ "$tool" != memcheck ] || api="--report-api-errors no"
    rm -f "$log.code"
    # The exit code of verify itself, whatever the tool makes of it. shellcheck disable=SC2016,SC2086
    timeout "$seconds" compute-sanitizer --tool "$tool" --target-processes all --print-limit 100000 $api \
      sh -c 'code=0; "$@" || code=$?; echo $code >"$0"; exit $code' "$log.code" "$moeforge" verify "$file" --timeout-ms 120000 >"$log" 2>&1 || true
    verified=$(cat "$log.code" 2>/dev/null || echo "none within $seconds s")
    found=0
    python3 tests/gpu/sanitize_report.py "$log" >"$log.found" || found=1
    result=ok
    grep -q 'SUMMARY: ' "$log" || found=1
    [ "$verified" = 0 ] && [ "$found" = 0 ] || { result=FAILED; failed=1; }
    printf '%-8s %s, %s: verify exited with %s; %s\n' "$result" "$tool" "$p" "$verified" "$(grep -ohE '[A-Z]+ SUMMARY: .*' "$log" | sort | uniq -c | sed 's/^ *//' | tr '\n' ';' | cut -c1-160)"
    cat "$log.found"
  done
done
[ "$failed" = 0 ] || echo "logs: $dir"
exit "$failed"
