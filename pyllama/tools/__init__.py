"""Command-line programs: `llama-cli` (cli), `llama-bench` (bench), the GGUF file tools (gguf) and others."""
