"""Alert rules for Prometheus and a dashboard for Grafana, as files beside this one. See docs/metrics.md."""
