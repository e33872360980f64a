"""CamemBERT: RoBERTa on French, with a Unigram tokenizer.

Source: Martin et al. 2020, and transformers' ``CamembertFor*``. The tensors have RoBERTa's names.
"""

from typing import Final

from cloze.export.families.roberta import roberta_family

FAMILY: Final = roberta_family("camembert", "Camembert", "CamembertTokenizer")
