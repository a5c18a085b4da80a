"""The compiler of a gateway's model, and requests with a grammar."""

from dataclasses import replace

from gateway.config import GatewayConfig
from gateway.grammars.compiling.compiler import GrammarCompiler
from gateway.grammars.compiling.frames import Setup
from gateway.grammars.compiling.limits import GrammarLimits
from gateway.requests.text import Text
from gateway.types.constraint import CompiledGrammar
from gateway.types.generation import GenerationRequest
from services.runtime.errors import InvalidArgument

DIGEST_CHARS = 16
NOT_COMBINED = "cannot be combined with a schema, a grammar or a required tool call"


def make_compiler(config: GatewayConfig, text: Text) -> GrammarCompiler:
    """A compiler with the config's limits for a model's tokenizer."""
    limits = GrammarLimits(
        max_source_bytes=config.max_grammar_bytes,
        cache_bytes=config.grammar_cache_bytes,
        max_waiting=config.max_grammars_waiting,
        max_waiting_per_tenant=config.max_grammars_waiting_per_tenant,
        limit_s=config.grammar_limit_s,
        memory_bytes=config.grammar_memory_bytes,
    )

    def make_setup() -> Setup:
        return Setup(
            tokenizer=text.backend.to_str(),
            vocabulary_tokens=max(text.vocabulary_tokens, text.backend.get_vocab_size()),
            eos_ids=sorted(text.eos_ids),
            slow_s=limits.slow_s,
            limit_s=limits.limit_s,
            memory_bytes=limits.memory_bytes,
        )

    return GrammarCompiler(limits, make_setup)


def apply_grammar(request: GenerationRequest, grammar: CompiledGrammar) -> GenerationRequest:
    """The request with its compiled constraint. Answers of one constraint have similar lengths:
    unless the client names an application, they are forecast as one. Raises InvalidArgument if few
    tokens are allowed: often none of them could continue the answer."""
    if request.sampling.allowed_token_ids:
        raise InvalidArgument("allowed_token_ids", NOT_COMBINED)
    client, constraint = request.client, request.client.constraint
    if constraint is not None and not client.application:
        name = f"grammar-{constraint.digest.hex()[:DIGEST_CHARS]}"
        client = replace(client, application=name)
    sampling = replace(
        request.sampling,
        grammar=grammar.text,
        constraint=constraint,
        grammar_tokens=grammar.least_tokens,
    )
    return replace(request, client=replace(client, constraint=None), sampling=sampling)
