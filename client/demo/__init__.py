"""`octet demo`: one small GPT at several precision levels, side by side, over the REST API as any user's jobs."""
