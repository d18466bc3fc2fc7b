"""Mathematical answers: found in a response, read, and compared by what they mean.

```
response --extraction--> text --tokens, reader--> value --equality--> same or not
```
`judging` puts these together. Nothing here imports more than sympy, so that the
processes that compare are up quickly.
"""
