"""Twenty prompts for whole-model checks: English, code, Chinese, emoji, chat; about 20 to 400 tokens each with SmolLM2."""

from __future__ import annotations

PROMPTS: dict[str, str] = {
    "english-short": "The quickest way from the harbour to the old mill is to follow the river until the second bridge, then",
    "english-fact": (
        "Water boils at one hundred degrees Celsius at sea level. On a high mountain the air presses less, so the water boils at a "
        "lower temperature, and an egg takes"
    ),
    "english-story": (
        "Mara found the letter under the third stair, where the wood had split the winter before. It was addressed to nobody. The "
        "ink had gone brown, and the hand was small and careful, as if the writer had been short of paper. She sat down on the "
        "step and read it twice. It spoke of a garden, a locked gate, and a key that had been thrown into the well on purpose. "
        "Outside, the rain had stopped. She put on her coat, took the lamp from its hook and"
    ),
    "english-essay": (
        "A library is a promise that strangers make to one another. Somebody pays for the roof, somebody mends the spines, somebody "
        "decides that a book read by three people in forty years still deserves its place on the shelf. None of them will meet the "
        "child who, one wet afternoon, takes that book down and decides to become an astronomer. This is why arguments about cost "
        "so often miss the point. The cost of a library can be counted; what it returns arrives late, in another town, under "
        "another name. The same is true of parks, of clean rivers and of good schools. We plant them for people whom we shall "
        "never know, because other people planted them for us. When a council proposes to close a branch for two days each week, "
        "it is not merely saving two days of wages. It is telling everybody who walks past the dark window that the promise now "
        "has opening hours. Of course there are limits. A town of four thousand people cannot keep a hall of rare manuscripts, and "
        "a building with a leaking roof serves nobody. But the first question should be what we owe to those who come after us, "
        "and only the second what the account book says this year. Those who ask the questions in the other order usually find "
        "that the answer to the first has already been given. There is a simple test that I have seen applied with success. Ask "
        "each member of the council to name one book, borrowed and not bought, that changed what they wanted from life. Most of "
        "them will remember the shelf, the light, and the name of the librarian. Then ask how much that afternoon had cost, and "
        "who had paid for it, and whether they would"
    ),
    "english-list": (
        "Shopping list for the weekend:\n- two loaves of bread\n- a dozen eggs\n- 500 g of flour\n- butter\n- six apples\n- olive oil\n"
        "- coffee beans\n\nThings to do:\n1. Call the plumber about the kitchen tap.\n2. Return the drill to Tom.\n3. Buy stamps.\n4."
    ),
    "english-numbers": (
        "In 1969 two people walked on the Moon; by 1972 there had been 12. The trip of 384,400 km took about 3 days at an average "
        "of 5,300 km/h. 7 x 8 = 56, 9 x 6 = 54, 12 x 12 ="
    ),
    "english-dialogue": (
        '"You are late," said the captain.\n"The tide was late," said the boy, "and I came with the tide."\n"Then tell the tide that '
        'we sail at noon, with it or without it."\nThe boy looked at the sky. "She says that you will want to wait,"'
    ),
    "repetition": "one two three four five six seven eight nine ten " * 5 + "one two three",
    "python-function": (
        "def moving_average(values: list[float], window: int) -> list[float]:\n"
        '    """Mean of each run of `window` neighbours."""\n'
        "    if window <= 0:\n"
        '        raise ValueError(f"window must be positive, found {window}")\n'
        "    total = sum(values[:window])\n"
        "    averages = [total / window]\n"
        "    for leaving, entering in zip(values, values[window:]):\n"
        "        total += entering -"
    ),
    "python-class": (
        "import heapq\nfrom dataclasses import dataclass, field\n\n\n@dataclass(order=True)\nclass Task:\n    due: float\n"
        "    name: str = field(compare=False)\n\n\nclass Agenda:\n    def __init__(self) -> None:\n        self._tasks: list[Task] = []\n\n"
        "    def add(self, due: float, name: str) -> None:\n        heapq.heappush(self._tasks, Task(due, name))\n\n"
        "    def next(self) -> Task | None:\n        return heapq.heappop(self._tasks) if self._tasks else None\n\n"
        "    def __len__(self) -> int:\n        return"
    ),
    "cpp": (
        "#include <cstdint>\n#include <vector>\n\n// Sieve of Eratosthenes: all primes below `limit`.\n"
        "std::vector<uint32_t> primes_below(uint32_t limit) {\n    std::vector<bool> composite(limit, false);\n"
        "    std::vector<uint32_t> primes;\n    for (uint32_t n = 2; n < limit; ++n) {\n        if (composite[n]) continue;\n"
        "        primes.push_back(n);\n        for (uint64_t m = uint64_t(n) * n; m < limit; m += n) composite[m] ="
    ),
    "shell-json": (
        '$ curl -s http://localhost:8080/health | jq .\n{\n  "status": "ok"\n}\n$ cat config.json\n{\n  "name": "demo",\n'
        '  "ports": [8080, 8081],\n  "debug": false,\n  "limits": {"memory": "2G", "threads": 4}\n}\n$ jq .limits.threads config.json\n'
    ),
    "sql": (
        "SELECT customers.name, COUNT(orders.id) AS n_orders, SUM(orders.total) AS revenue\nFROM customers\n"
        "LEFT JOIN orders ON orders.customer_id = customers.id\nWHERE orders.created_at >= '2024-01-01'\nGROUP BY customers.name\nHAVING"
    ),
    "chinese-short": "今天天气很好，我们一起去公园",
    "chinese": (
        "从前有一个小村庄，村子旁边有一条清澈的河。每天早上，孩子们都到河边洗脸、唱歌。有一天，河水突然变成了金色，大家都很惊讶。老人说：“这是春天来了。”"
    ),
    "emoji": "Trip plan: ✈️ Paris 🗼, then 🚄 to Lyon 🍷, then 🏖️ Nice! Mood: 😀😎🎉. Packing: 👕👖🧦🪥",
    "mixed-script": "Prices: €12.50, £9.99, ¥1500. Names: José, Zoë, Łukasz, Ольга, Γιώργος, 田中, محمد. Temperatures: −5 °C … 37 °C.",
    "chat-question": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat is the capital of France, and what is it "
        "known for?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "chat-history": (
        "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\nRed, yellow and blue.<|im_end|>\n"
        "<|im_start|>user\nWhat do I get when I mix the first two?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "markdown-table": (
        "# Results\n\n| Model | Size | Speed |\n|:------|-----:|------:|\n| small | 135M | 160 tok/s |\n| medium | 360M | 70 tok/s |\n"
        "| large | 1.7B | 15 tok/s |\n\nThe **small** model is"
    ),
}
