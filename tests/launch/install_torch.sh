#!/usr/bin/env bash
# Make the environment of the judges of torchtitan and DeepSpeed beside the project's own, whose
# torch it uses. DeepSpeed 0.19.8 reads MoE models of transformers up to 5.22.
set -euo pipefail
folder=.venv-launch-torch
wanted="$(cat "$0")"
[[ -f "$folder/.ready" && "$(cat "$folder/.ready")" == "$wanted" ]] && exit 0
rm -rf "$folder"
.venv/bin/python -m venv "$folder"
site="$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/zz_project.pth"
"$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps \
    torchtitan==0.3.0 spmd_types==0.2.3 torchdata==0.11.0 torch_checkpointing==0.1.1 triton==3.9.0 \
    'datasets<4.8' tyro docstring-parser typeguard shtab tensorboard pyarrow dill multiprocess xxhash \
    pandas python-dateutil pytz tzdata six setuptools wheel protobuf absl-py grpcio markdown werkzeug einops pillow \
    transformers==5.22.2 hjson msgpack ninja py-cpuinfo pydantic pydantic-core annotated-types \
    typing-inspection
DS_BUILD_OPS=0 "$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps \
    --no-build-isolation deepspeed==0.19.8
printf '%s' "$wanted" > "$folder/.ready"
