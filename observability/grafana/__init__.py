"""Grafana's dashboards as code: `python -m observability.grafana.build` writes them as JSON."""
