"""Command-line programs: `llama-cli` (cli) and `llama-bench` (bench)."""
