"""The `rl` commands of the pages, run as a reader would.

```
pages -> commands -> rule of each -> folder with what the page assumes -> run, in order
                        kit of models, rows, files and runs ──┘
```
"""
