"""Exact mode: few layers or a lookup draft tokens, full depth verifies them."""
