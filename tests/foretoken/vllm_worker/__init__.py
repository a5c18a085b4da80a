"""The worker with vLLM's engine, without vLLM."""
