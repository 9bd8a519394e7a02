#!/usr/bin/env bash
# Make the environment of the launch oracle's judges beside the project's own, whose torch it uses:
# runtimes from the package registry, without what they need on GPUs.
set -euo pipefail
folder=.venv-launch
wanted="$(cat "$0")"
[[ -f "$folder/.ready" && "$(cat "$folder/.ready")" == "$wanted" ]] && exit 0
rm -rf "$folder"
.venv/bin/python -m venv "$folder"
site="$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/zz_project.pth"
"$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps \
    megatron-core==0.16.1 megatron-bridge==0.3.1 'transformers==4.57.6' 'tokenizers==0.22.2' \
    'huggingface-hub==0.36.0' omegaconf==2.3.0 'antlr4-python3-runtime==4.9.3' 'hydra-core==1.3.2' \
    einops sentencepiece six pillow requests regex tqdm pyyaml fsspec filelock packaging
printf '%s' "$wanted" > "$folder/.ready"
