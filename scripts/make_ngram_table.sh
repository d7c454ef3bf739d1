#!/usr/bin/env bash
# The recipe of the n-gram table that ships for the default model. Usage: scripts/make_ngram_table.sh [ANSWERS_DIR] [TOKENS]
# Resumable: an interrupted run goes on with the answers recorded so far.
set -euo pipefail
cd "$(dirname "$0")/.."
answers=${1:-answers}
tokens=${2:-1264000}
out=autopipe/drafters/smollm2-135m.ngram

.venv/bin/autopipe drafts answers --target smollm2-135m --out "$answers" --tokens "$tokens"
.venv/bin/autopipe drafts ngram --answers "$answers" --out "$out.safetensors" --max-mib 6.9 | tee "$out.log"
