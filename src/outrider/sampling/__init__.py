"""From logits to laws: penalties, bans and processors, then temperature and filters."""
