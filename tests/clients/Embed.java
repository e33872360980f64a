import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Posts a body twice, as Spring AI and LangChain4j do: java Embed.java ADDRESS BODY */
class Embed {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient(); // asks for HTTP/2 by an upgrade
        HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0]))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(arguments[1]))
            .build();
        String body = "";
        for (int turn = 0; turn < 2; turn++) {
            HttpResponse<String> response =
                client.send(request, HttpResponse.BodyHandlers.ofString());
            if (response.statusCode() != 200) throw new IllegalStateException(response.body());
            body = response.body();
        }
        System.out.println(body);
    }
}
