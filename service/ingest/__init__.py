"""The path of a report: `app` receives a request, `batches` parses it, `decide` judges it, `apply` writes it.

It is one small ASGI application, and complete: it authenticates, and answers its own errors. The
API's process mounts it at the path of `app.PATH`; another process may serve it alone.
"""
