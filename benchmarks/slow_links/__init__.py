"""Strategies over slow links, which are had between network namespaces.

models    what is trained
worker    one process of a pair: it holds the compiled steps, and times them
pair      two of them, on hosts whose link is limited
judge     what the times say of predictions and of a choice
"""
