#!/usr/bin/env bash
# Make the environment of the judge of Megatron-Bridge 0.4 to 0.6 beside the project's own, whose
# torch it uses. Their `pyproject.toml` pin transformers: 5.0 to 5.3 for 0.4, 5.8 for 0.5 and 0.6.
set -euo pipefail
folder=.venv-launch-bridge
wanted="$(cat "$0")"
[[ -f "$folder/.ready" && "$(cat "$folder/.ready")" == "$wanted" ]] && exit 0
rm -rf "$folder"
.venv/bin/python -m venv "$folder"
site="$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/zz_project.pth"
"$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps \
    'transformers==5.8.1' 'tokenizers==0.22.2' 'huggingface-hub==1.11.0' omegaconf==2.3.0 \
    'antlr4-python3-runtime==4.9.3' 'hydra-core==1.3.2' einops sentencepiece six pillow requests \
    regex tqdm pyyaml fsspec filelock packaging safetensors
"$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps \
    --target "$folder/transformers-5.3" 'transformers==5.3.0'
printf '%s' "$wanted" > "$folder/.ready"
