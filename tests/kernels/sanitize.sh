#!/usr/bin/env bash
# The kernels under sanitizers, with other compilers and for other processors: sanitize.sh [problems per build]
# Needs g++; takes clang++, and aarch64-linux-gnu-g++ with qemu-aarch64-static, where they are installed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
problems=${1:-300}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
flags=(-std=c++20 -g -O1 -ffp-contract=fast -fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-psabi
    -I "$here/../../src/continuous_attention/kernels/cpu" "$here/sanitize.cpp" -pthread -ldl)
memory=(-fsanitize=address,undefined -fno-sanitize-recover=all)

# check NAME "RUNNER…" COMPILER OPTION…
check() {
    local name=$1 runner=$2 said
    shift 2
    if ! command -v "$1" >/dev/null; then
        echo "$name: left out, $1 isn't installed"
        return
    fi
    "$@" "${flags[@]}" -o "$build/$name"
    said=$($runner "$build/$name" "$problems") || { echo "$name: failed: $said"; exit 1; }
    echo "$name: $said"
}

avx2=-march=x86-64-v3
check avx2 "" g++ $avx2 "${memory[@]}"
check portable "" g++ "${memory[@]}"
# Vectors of 16 lanes, as AVX-512 has them, on a machine without.
check wide "" g++ $avx2 -DCSA_WIDTH=16 "${memory[@]}"
# Tiles of bfloat16, as AMX has them, in plain C++.
check tiles "" g++ $avx2 -DCSA_WIDTH=16 -DCSA_EMULATE_AMX "${memory[@]}"
check threads "" g++ $avx2 -fsanitize=thread
grep -q avx512vl /proc/cpuinfo && check avx512 "" g++ -march=x86-64-v4 "${memory[@]}"
clang=$(compgen -c clang++- | sort -V | tail -1 || true)
check clang "" "${clang:-clang++}" $avx2
check arm "qemu-aarch64-static -L /usr/aarch64-linux-gnu" aarch64-linux-gnu-g++
