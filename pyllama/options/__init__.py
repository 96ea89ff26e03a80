"""Command-line options of every program: one table (`options.json`), from which all else is derived.

`parse_options(tool, argv, environ)` gives an `Options` object: one attribute per *dest*, the long name with `_` for `-`
(`--ctx-size` is `options.ctx_size`), with these exceptions:

- `--sampler-seq` sets `samplers`, `--rope-scale N` sets `rope_freq_scale` to 1/N, `-v` sets `verbosity`;
- `--lora` and `--lora-scaled` add (path, scale) pairs to `adapters`, `--control-vector` and `--control-vector-scaled`
  to `control_vectors`;
- `--typical` is `typical_p`, `--temp` is `temperature`, `--predict` is `n_predict`, `--gpu-layers` is `n_gpu_layers`;
- options that read a file keep the path under their own name and put the contents where the contents belong:
  `--file` in `prompt`, `--system-prompt-file` in `system_prompt`, `--chat-template-file` in `chat_template`,
  `--grammar-file` in `grammar`, `--json-schema-file` in `json_schema`,
  `--api-key-file` appends to `api_key`.

Values: flags are bool, `on|off|auto` options are those words, lists are tuples of str (or numbers). `seed` is unsigned
32 bit, `samplers` holds canonical names, `logit_bias` pairs (id, bias), `override_kv` pairs (key, value).
`threads_batch` is None where it follows `threads`. `options.given(dest)` tells whether the user set a value,
`options.source(dest)` from where. Defaults exist once, in the table.
"""

from .adapters import adapter_arguments
from .errors import OptionError
from .grammar import grammar_from_options
from .parser import Options, Source, parse, parse_options
from .placement import draft_placement, placement_request
from .rope import rope_arguments
from .table import TOOLS, Option, gone_options, options_of

__all__ = [
    "TOOLS",
    "Option",
    "OptionError",
    "Options",
    "Source",
    "adapter_arguments",
    "draft_placement",
    "gone_options",
    "grammar_from_options",
    "options_of",
    "parse",
    "parse_options",
    "placement_request",
    "rope_arguments",
]
