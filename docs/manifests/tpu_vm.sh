#!/bin/bash
# All hosts of one TPU slice as one run that goes on by itself.
#
#   PROJECT=… ZONE=… TPU=… ./tpu_vm.sh gs://bucket/runs/train
#
# Nothing describes the group: `initialize()` asks the metadata server of each host.
# Each host has a launcher with one process. When a process dies, those of the other
# hosts end by the heartbeat; all launchers start theirs again, and they meet anew. Three
# restarts without progress are the end.
set -euo pipefail

directory=${1:?usage: tpu_vm.sh DIRECTORY}
: "${PROJECT:?}" "${ZONE:?}" "${TPU:?}"

gcloud compute tpus tpu-vm ssh "$TPU" --project="$PROJECT" --zone="$ZONE" --worker=all \
  --command="replicator launch --processes 1 train.py --directory $(printf %q "$directory")"
