"""A worker in front of a backend: a backend is an OpenAI-compatible server that computes in this
worker's place. The worker sends admitted requests there, and passes the tokens of their answers on.
The modules here call it the server.
"""
