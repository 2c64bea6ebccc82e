"""Documents, sentence index, pseudo-labels, query generation and answers.

Must not import models or Ray: rankers and clusters are passed in.
"""
