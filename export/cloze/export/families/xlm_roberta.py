"""XLM-RoBERTa: RoBERTa on a hundred languages, with a Unigram tokenizer.

Source: Conneau et al. 2020, and transformers' ``XLMRobertaFor*``. The tensors have RoBERTa's names.
"""

from typing import Final

from cloze.export.families.roberta import roberta_family

FAMILY: Final = roberta_family("xlm-roberta", "XLMRoberta", "XLMRobertaTokenizer")
