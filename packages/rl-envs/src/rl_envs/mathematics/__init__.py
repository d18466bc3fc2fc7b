"""Extraction, parsing and comparison of mathematical answers by their meaning.

```
response --extraction--> text --tokens, reader--> value --equality--> same or not
```
`judging` combines these. Only sympy is imported here, so that the processes that
compare answers start quickly.
"""
