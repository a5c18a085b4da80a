"""Prometheus' rules as code: `python -m observability.prometheus.build` writes them as YAML."""
