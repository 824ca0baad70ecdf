"""What tests must know of stub_connector.py without importing vLLM."""

MODULE = "tests.worker_host.stub_connector"
FINGERPRINT = "stub-fingerprint"
