#!/usr/bin/env bash
# Fresh machine to a trained model: real pictures, training, zero-shot figures, embeddings, search.
# Running it again resumes what was interrupted and leaves alone what is complete.
source "$(dirname "$0")/environment.sh" demo

data=data/openmoji
run=runs/quickstart

multimodal pack demo:openmoji "$data"
multimodal train configs/recipes/quickstart.yaml
multimodal embed "$run" "$data/{train,variants,concepts,concepts-toned}/*.tar" "$run/embeddings"

cat <<TEXT

  run folder   $run (config.yaml, metrics.jsonl, results.json, checkpoints/, model/)
  report       $run/report.png (curves, held-out pictures with their top-3 names)
  embeddings   $run/embeddings
  pictures     $data/pictures (held-out concepts as files)

Try next (source .venv/bin/activate first):
  multimodal classify $run $data/pictures/airplane.png --labels "cat,pizza,airplane"
  multimodal search $run/embeddings "red heart"
  multimodal train configs/recipes/quickstart.yaml run=runs/again train.duration="60 epochs"
TEXT
