"""A worker with vLLM's engine: `foretoken serve MODEL --engine vllm` starts it as
`python -m foretoken.vllm.worker`.

    gateway, scheduler ⇄ services/worker (streams, loop, metrics) ⇄ VllmEngine ⇄ vLLM's EngineCore
                                                            └ VllmState: prompts, plans, reports
"""
