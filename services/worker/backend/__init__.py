"""A worker in front of an OpenAI-compatible server: it sends admitted requests there, and passes
the tokens of their answers on."""
