"""What the server and its GPUs report about themselves, in one table on one clock (`core.schemas.METRICS`).

Three ways in, one table out: a Prometheus server (`prometheus.fetch`), a direct scrape (`recorder.Recorder`),
the virtual clock's own samples. Everything else here reads that table.
"""
