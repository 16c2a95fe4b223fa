#!/bin/bash
# All hosts of one TPU slice as one run that goes on by itself.
#
#   PROJECT=… ZONE=… TPU=… ./tpu_vm.sh /mnt/runs/train
#
# Nothing describes the group: `initialize()` asks the metadata server of each host.
# Each host has a launcher with one process. When a process dies, those of the other
# hosts end by the heartbeat; all launchers start theirs again, and they meet anew. Three
# restarts without progress are the end. They prove to each other that they know a
# secret, which is copied to all hosts first. The folder lies on a disk that all hosts have
# mounted (Filestore); what is compiled is kept beside it.
#
# For `memory_copy_every=` give each launcher its host's address, so that copies go to the
# next host, too: `--copies-host \$(hostname -I | cut -d' ' -f1)` behind `--processes 1`.
set -euo pipefail

directory=${1:?usage: tpu_vm.sh DIRECTORY}
: "${PROJECT:?}" "${ZONE:?}" "${TPU:?}"

secret=$(mktemp)
trap 'rm -f "$secret"' EXIT
head -c 32 /dev/urandom > "$secret"
gcloud compute tpus tpu-vm scp "$secret" "$TPU":.replicator-secret \
  --project="$PROJECT" --zone="$ZONE" --worker=all

gcloud compute tpus tpu-vm ssh "$TPU" --project="$PROJECT" --zone="$ZONE" --worker=all \
  --command="chmod 600 .replicator-secret && \
    REPLICATOR_RPC_SECRET_FILE=.replicator-secret \
    JAX_COMPILATION_CACHE_DIR=$(printf %q "$directory-xla") \
    replicator launch --processes 1 train.py --directory $(printf %q "$directory")"
