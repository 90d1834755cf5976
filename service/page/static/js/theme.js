// Sets the chosen theme before the first paint. Without a choice the system's is used.
{
  const chosen = localStorage.getItem("octet-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}
