#!/usr/bin/env bash
# Makes the neural drafter that ships for smollm2-135m. Hours on two cores; stop it at any moment and call it again.
#
#   scripts/make_neural_drafter.sh [WORK_FOLDER]            answers, training
#   scripts/make_neural_drafter.sh [WORK_FOLDER] --more     train the shipped drafter on, on answers to other prompts
#   scripts/make_neural_drafter.sh [WORK_FOLDER] --install  put what is trained so far into the package
#
# TOKENS (of training, repeats counted), ANSWERS (tokens of answers) and, for --more, SEED (of the prompts) come from the
# environment. What --more makes is a training of its own: install it from WORK_FOLDER/more.
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-out/drafter}
tokens=${TOKENS:-3300000}
answers=${ANSWERS:-720000}
autopipe=.venv/bin/autopipe
[ -x "$autopipe" ] || autopipe=autopipe
shipped=autopipe/drafters/smollm2-135m.neural

if [ "${2:-}" = --more ]; then
    "$autopipe" drafts answers --out "$work/more/answers" --tokens "${ANSWERS:-233490}" --seed "${SEED:-11}"
    "$autopipe" drafts distill --answers "$work/more/answers" --out "$work/more/training" --from smollm2-135m \
        --batch-tokens 1200 --learning-rate 0.001 --head-learning-rate 0.0001 \
        --max-length 512 --cooldown 0.9 --tokens "${TOKENS:-600000}"
    exit
fi
if [ "${2:-}" != --install ]; then
    "$autopipe" drafts answers --out "$work/answers" --tokens "$answers"
    "$autopipe" drafts distill --answers "$work/answers" --out "$work/training" \
        --layers 0-3 --rank 64 --head 6144 --batch-tokens 1200 --learning-rate 0.01 --head-learning-rate 0.001 \
        --max-length 512 --cooldown 0.75 --tokens "$tokens"
fi
mkdir -p "$shipped"
cp "$work"/training/drafter/* "$work"/training/curve.csv "$work"/training/curve.png "$shipped"/
cat > "$shipped/NOTICE" <<'NOTE'
This drafter was trained by scripts/make_neural_drafter.sh on answers of SmolLM2-135M-Instruct, and starts from that
model's weights (Apache License 2.0, Copyright Hugging Face). It is distributed under the same license.
NOTE
du -sh "$shipped"
