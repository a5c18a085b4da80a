"""Batches of Anthropic's client for Python: prints what the server at argv[1] makes of one."""

import json
import sys
import time

import anthropic

URL = sys.argv[1]


def asking(text: str, **params) -> dict:
    message = {"role": "user", "content": text}
    return {"model": "demo", "max_tokens": 32, "messages": [message], "top_k": 1, **params}


with anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0) as client:
    batches = client.messages.batches
    batch = batches.create(
        requests=[
            {"custom_id": "a", "params": asking("Reverse: red blue green")},
            {"custom_id": "b", "params": asking("Reverse: red", temperature=9)},
        ]
    )
    listed = [each.id for each in batches.list(limit=1)]
    while (batch := batches.retrieve(batch.id)).processing_status != "ended":
        time.sleep(0.1)
    results = {each.custom_id: each.result for each in batches.results(batch.id)}
    try:
        batches.cancel(batch.id)
    except anthropic.BadRequestError as error:
        refused = error.body["error"]["message"]
    print(json.dumps({
        "listed": listed == [batch.id],
        "counts": batch.request_counts.model_dump(),
        "answer": results["a"].message.content[0].text,
        "fault": results["b"].error.error.message,
        "refused": refused,
        "deleted": batches.delete(batch.id).type,
    }))  # fmt: skip
