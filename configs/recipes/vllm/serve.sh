#!/bin/sh
# vLLM's server with SkipDecode at 2x: serve.sh MODEL SPEED_ADAPTER [further arguments of vLLM]
model=$1 adapter=$2
shift 2
exec ${VLLM:-vllm serve} --model "$model" --worker-cls actors.vllm.worker.SkipWorker \
	--scheduler-cls actors.vllm.scheduler.SkipAsyncScheduler \
	--additional-config "{\"skipdecode\": {\"speed_adapter\": \"$adapter\", \"speedup\": 2, \"decay\": \"constant\"}}" "$@"
