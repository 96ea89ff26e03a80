"""Structured output: GBNF grammars and JSON schemas, and the tokens that they allow."""

from pyllama.grammar.constraint import Constraint, ConstraintFailed, GrammarCompiler, GrammarError, GrammarSource
from pyllama.grammar.llama_grammar import LlamaGrammar

__all__ = ["Constraint", "ConstraintFailed", "GrammarCompiler", "GrammarError", "GrammarSource", "LlamaGrammar"]
