"""Model files from Hugging Face, ModelScope or a URL: found, fetched, resumed, verified, kept in a cache.

| module | subject |
|---|---|
| `selection` | which files of a repository make up the model that was asked for |
| `session` | HTTP: proxies, redirects, tokens, retries |
| `hub` | what a repository holds: paths, sizes, checksums |
| `transfer` | one file, resumed and verified |
| `fetch`, `progress` | several files at once, and what the user sees of it |
| `cache` | where files live: the layout that llama.cpp and huggingface_hub share |
| `model_options` | from `-m`, `-hf`, `-mu` and their kin to a local file |
"""
